"""Unpacked layers in models with packed ones: windows, chunks, linear attention, SSM and convolutions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from refusals import refused
from small_types import PACKED, WINDOW, tiny
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, patch, report, unpatch
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.planning.check import check

pytestmark = pytest.mark.usefixtures("no_grad")

WINDOWED = ["gemma2", "llama4_text"]
STATES = ["qwen3_next", "granitemoehybrid", "falcon_h1"]
GREEDY = {"max_new_tokens": 66, "do_sample": False}  # past the window, and past a block
SHORT = {**GREEDY, "max_new_tokens": 5}
IDS = torch.randint(1, 101, (2, 30), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :11] = 0


def patched(model: PreTrainedModel, method: str = "none", **settings: Any) -> PreTrainedModel:
    return patch(model, method, impl="reference", family=False, **settings)


@pytest.mark.filterwarnings("ignore:nothing is packed")
@pytest.mark.parametrize("family", [name for name in PACKED if name != "deepseek_v3"])
def test_report_counts_every_layer(family):
    model = patched(tiny(family), "int8")
    cache = model.generate(IDS, return_dict_in_generate=True, **SHORT).past_key_values
    data = report(model).to_dict()
    assert data["kv_bytes"] == sum(t.nbytes for t, _ in cache.state_tensors().values())
    assert [row["kernels"] != "model" for row in data["layers"]] == PACKED[family]
    for row in data["layers"]:
        if "own" in row:
            assert (row["bytes"] > 0) == (row["kind"] != "dummy") and row["packed_tokens"] == 0
            assert row["effective_bits_total"] == (32 if row["bytes"] else None)
    assert data["packed_tokens"] == (2 * 34 if any(PACKED[family]) else 0)
    if not all(PACKED[family]):
        text = str(report(model))
        assert "not packed:" in text and "layers are not packed" in text
    assert data["decode"] == "eager" and "cannot be captured" in data["decode_reason"]


@pytest.mark.parametrize("family", WINDOWED)
def test_crop_within_the_window(family):
    """Past it, and of states, `crop` is refused."""
    model = patched(tiny(family))
    cache = model(IDS[:, : WINDOW - 4]).past_key_values
    want = model(IDS[:, 16:24], past_key_values=copy.deepcopy(cache)).logits
    model(IDS[:, 20:23], past_key_values=cache)
    cache.crop(-3)
    got = model(IDS[:, 16:24], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    refused(lambda: cache.crop(-3), UnsupportedError, "cannot crop 3", str(WINDOW), "fresh cache")
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {24}
    cache.crop(-24)
    assert int(cache.get_seq_length()) == 0
    torch.testing.assert_close(model(IDS[:, :16], past_key_values=cache).logits, model(IDS[:, :16]).logits)


@pytest.mark.parametrize("family", STATES)
def test_a_refused_crop_changes_no_state_and_reset_empties_it(family):
    model = patched(tiny(family))
    cache = model(IDS).past_key_values
    want = model(IDS[:, :3], past_key_values=copy.deepcopy(cache)).logits
    with pytest.raises(UnsupportedError, match="cannot crop 1"):
        cache.crop(-1)
    assert torch.equal(model(IDS[:, :3], past_key_values=cache).logits, want)
    cache.reset()
    torch.testing.assert_close(model(IDS, past_key_values=cache).logits, model(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("family", ["gemma2", *STATES])
def test_an_interrupted_call_has_never_been(family, tokens, error):
    """Unpacked states are restored like packed layers. `tokens` were read before."""
    model = patched(tiny(family))
    cache, twin = (QAttnCache.for_model(model) for _ in range(2))
    for each in (cache, twin) if tokens else ():
        model(IDS, past_key_values=each)
    more = IDS[:, : tokens or 30]
    for layer in model.model.layers:
        hook = layer.register_forward_hook(lambda *args: (_ for _ in ()).throw(error()))
        with pytest.raises(error):
            model(more, past_key_values=cache)
        hook.remove()
    for ids in (more, IDS[:, :1], IDS[:, :40]):
        assert torch.equal(*(model(ids, past_key_values=each).logits for each in (cache, twin)))


def test_what_fails_before_any_layer_leaves_the_cache_whole():
    model = patched(tiny("gemma2"))
    cache = model(IDS).past_key_values
    want = model(IDS[:, :3], past_key_values=copy.deepcopy(cache)).logits
    with pytest.raises(IndexError):
        model(IDS[:, :3] + 500, past_key_values=cache)
    assert torch.equal(model(IDS[:, :3], past_key_values=cache).logits, want)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_models_own_attention_stays(attn):
    model = tiny("gemma3_text", attn_implementation=attn)
    want = model.generate(IDS, attention_mask=MASK, **SHORT)
    assert torch.equal(patched(model).generate(IDS, attention_mask=MASK, **SHORT), want)
    assert torch.equal(patched(model, "int8").generate(IDS, attention_mask=MASK, **SHORT)[:, :31], want[:, :31])
    assert unpatch(model).config._attn_implementation == attn


def test_other_attention_is_refused():
    model = tiny("gemma2")
    model.config._attn_implementation_internal = "flex_attention"
    refused(lambda: patched(model), UnsupportedError, "flex_attention", "attn_implementation='sdpa'")
    assert not hasattr(model, "_qattn")


@pytest.mark.parametrize("decode", ["graph", "compile"])
def test_steps_that_cannot_be_captured_are_refused(decode):
    refused(
        lambda: patched(tiny("gemma2"), decode=decode),
        UnsupportedError,
        decode,
        "1 unpacked layers",
    )


def test_settings_for_layers_that_are_not_packed():
    model = tiny("gemma2", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    refused(
        lambda: patched(model, "turbo", layers={"0,2": {"bits": 2}}), RecipeError, "0,2", "not packed", "window of 20"
    )
    patched(model, "turbo", layers={"0-1": {"bits": 2}})


def test_over_stock_caches_is_refused():
    refused(lambda: patch(tiny("gemma2"), "sage2", cache="model"), UnsupportedError, "sliding_attention", "layers [0]")


@pytest.mark.parametrize("family", ["gemma2", "llama4_text", "lfm2_moe", "granitemoehybrid"])
def test_check_predicts_the_bytes(family):
    model = tiny(family).to(torch.bfloat16)
    model.config.dtype = model.dtype
    found = check(model.config, "int8", device_type="cpu", at_tokens=64)
    cache = (
        patched(model, "int8")
        .generate(IDS[:1].repeat(1, 2), min_new_tokens=5, return_dict_in_generate=True, max_new_tokens=5)
        .past_key_values
    )
    counted = [row["bytes"] for row in report(cache).to_dict()["layers"]]
    assert found.refused is None and not found.uncounted
    own = [i for i, packed in enumerate(PACKED[family]) if not packed]
    assert [found.layers[i]["bytes"] for i in own] == [counted[i] for i in own]
