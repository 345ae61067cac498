"""Models whose sliding windows are packed (`sliding="packed"`) or exact, in the packed cache or the model's."""

from __future__ import annotations

import copy
import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fake_graphs import as_on_a_gpu
from refusals import refused
from small_types import WINDOW, in_packed_cache, tiny
from transformers import Gemma3TextConfig, PreTrainedModel

from qattn_hf import QAttnCache, patch, report
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.layer.window_layer import WindowLayer
from qattn_hf.model.layer_kinds import WindowLayerSpec, of_method
from qattn_hf.planning.check import check
from qattn_hf.recipes.recipe import find_recipe
from qattn_kernels.launch.constants import PrefillSizes, Sizes
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step.warm import LayerShape, launches

pytestmark = pytest.mark.usefixtures("no_grad")

SLIDING, FULL = "sliding_attention", "full_attention"
PROMPT, NEW = 350, 40  # past the window, past a block, and past the capacity of a window's layer of 384 tokens
IDS = torch.randint(1, 101, (2, PROMPT), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :11] = 0
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": MASK}
SHORT: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


def patched(model: PreTrainedModel, method: str = "none", sliding: str = "packed", **settings: Any) -> PreTrainedModel:
    return patch(model, method, family=False, sliding=sliding, crop_horizon=32, **settings)


@pytest.mark.slow
def test_what_a_report_says():
    text, data = {}, {}
    for sliding in ("packed", "exact"):
        model = patched(tiny("gemma3_text"), "turbo", sliding)
        cache = model.generate(IDS, return_dict_in_generate=True, **GREEDY).past_key_values
        text[sliding], data[sliding] = str(report(model)), report(model).to_dict()
        assert data[sliding]["kv_bytes"] == sum(x.nbytes for x, _ in cache.state_tensors().values())
    window, full = data["packed"]["layers"]
    assert (window["kind"], window["window"], full["kind"], full["window"]) == (SLIDING, WINDOW, FULL, None)
    assert window["packed_tokens"] < full["packed_tokens"] == data["packed"]["packed_tokens"]
    assert window["bytes_full_precision"] == 2 * WINDOW * 2 * 2 * 16 * 4  # rows, tokens, sides, heads, channels, fp32
    assert "sliding window of 20" in text["packed"] and "not packed" not in text["packed"]
    assert "(sliding='exact': steps are eager on a cpu)" in " ".join(text["exact"].split())


def gemma3(**changes: Any) -> Gemma3TextConfig:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
    return Gemma3TextConfig(**{**sizes, "num_hidden_layers": 6, "vocab_size": 101, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("old", ["lossless", "model", "unquantized"])
def test_old_names_of_exact(old):
    with pytest.warns(FutureWarning, match=f"sliding='{old}' is an old name. Fix: use sliding='exact'"):
        recipe = find_recipe(f"turbo:sliding={old}", None, {})
    assert recipe.settings.sliding == "exact" and "sliding: exact" in recipe.as_yaml()


def test_a_choice_by_bytes_is_refused():
    refused(lambda: find_recipe("turbo:sliding=auto", None, {}), RecipeError, "sliding='auto'", "'packed'", "'exact'")


@pytest.mark.skipif(find_spec("triton") is None, reason="without Triton no kernel computes a layer")
@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        ("turbo", {}, None),
        ("sinkq", {}, None),  # its pool is in other layers than windows
        ("turbo:decode=eager", {}, "steps are eager with decode='eager'"),
        ("turbo:memory=1GiB", {}, "memory does not support packed windows"),
        ("turbo:impl=reference", {}, "kernels do not compute all layers"),
        ("turbo", {"head_dim": 24}, "kernels do not compute all layers"),
        ("turbo:block_kv=32,buffer_size=64", {}, "kernels do not compute all layers"),  # those without a window
    ],
)
def test_windows_lose_nothing_by_default(settings, changes, why):
    """Windows are in the packed cache if a GPU's steps are captured with them, and unpacked otherwise."""
    config = gemma3(sliding_window=512, **changes)
    recipe = find_recipe(settings, None, {})
    *windows, full = recipe.layer_specs(config, "cuda")
    assert of_method(full) and not isinstance(full, WindowLayerSpec)
    if why is None:
        assert all(isinstance(spec, WindowLayerSpec) and spec.unquantized for spec in windows)
    else:
        assert all(spec.why == f"sliding='exact': {why}" for spec in windows)
    assert all("steps are eager on a cpu" in spec.why for spec in recipe.layer_specs(config, "cpu")[:-1])


def test_windows_beside_other_states_are_the_models_own():
    specs = find_recipe("turbo", None, {}).layer_specs(tiny("lfm3").config, "cuda")
    (window,) = (spec for spec in specs if getattr(spec, "window", None) == WINDOW)
    assert window.why == "sliding='exact': steps are eager with convolution"


def test_check_predicts_the_bytes_of_a_cache():
    model = tiny("gemma3_text").to(torch.bfloat16)
    model.config.dtype = model.dtype
    method = "turbo:sliding=packed,family=false,crop_horizon=32"
    found = check(model.config, method, device_type="cpu", at_tokens=PROMPT + NEW)
    cache = patched(model, "turbo").generate(IDS[:1], return_dict_in_generate=True, max_new_tokens=NEW).past_key_values
    assert found.layers[0]["bytes"] == report(cache).to_dict()["layers"][0]["bytes"] == found.own_bytes
    assert found.layers[0]["bytes_per_token"] == 0 and found.bytes_per_token == found.layers[1]["bytes_per_token"] > 0
    memory = found.weight_bytes + found.kv_bytes
    assert abs(found.longest(memory) - PROMPT - NEW) <= 64  # a block


def test_windows_that_cannot_be_packed():
    sinks = {"method": "turbo", "sink_num": 4}
    refused(lambda: patched(tiny("gemma2"), **sinks), UnsupportedError, "sinks", "sliding='exact'")
    refused(lambda: patched(tiny("gemma2"), layers={"0": {"sliding": "packed"}}), RecipeError, "sliding", "all layers")
    with pytest.raises(RecipeError, match="sliding"):
        patched(tiny("gemma2"), sliding="yes")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:nothing is packed")
@pytest.mark.parametrize("family", ["mistral", "llama4_text"])
def test_unquantized_windows_lose_nothing(family, monkeypatch):
    """Whatever the method, and with sinks, which packed windows refuse; the report says that they are not packed."""
    in_packed_cache(monkeypatch)
    stock, windows = tiny(family), [True, family == "mistral"]
    want = stock.generate(IDS, **GREEDY)
    for method, settings in (("none", {}), ("turbo", {"bits": 2, "sink_num": 4})):
        model = patched(tiny(family), method, "exact", **settings)
        got = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(got.sequences, want) or (method != "none" and not all(windows))
        data = report(model).to_dict()
        assert [row["quantized"] for row in data["layers"]] == [method != "none" and not local for local in windows]
        first, *_, last = data["layers"]
        assert (first["method"], first["k_format"], first["packed_tokens"]) == ("none", "model", 0)
        assert first["effective_bits"] is None and data["effective_bits"] == last["effective_bits"]
        assert f"of {WINDOW}, unquantized" in str(report(model)).replace("\n", " ").replace("  ", "")


def test_what_is_said_of_unquantized_windows(monkeypatch):
    left = patched(tiny("gemma2"), "turbo", "exact")._qattn.runner.why
    assert "1 unpacked layers" in left and "sliding='packed'" in left
    in_packed_cache(monkeypatch)
    with pytest.warns(UserWarning, match="nothing is packed: every layer is unquantized, with sliding window of 20"):
        patched(tiny("mistral"), "turbo", "exact")
    single = {"layers": {"0": {"bits": 2}}}
    refused(lambda: patched(tiny("gemma2"), "turbo", "exact", **single), RecipeError, "not packed", "unquantized")
    rows = check(tiny("gemma3_text").config, "turbo:family=false", device_type="cpu").layers
    assert [(row["method"], row.get("window")) for row in rows] == [("none", WINDOW), ("turbo", None)]
    assert rows[0]["bytes"] > rows[0]["values"] * 4  # the room for calls and crops


def test_a_model_that_asks_for_another_window_is_refused():
    model = patched(tiny("mistral"))
    model.model.layers[1].self_attn.config.sliding_window = 30
    refused(lambda: model(IDS), UnsupportedError, "packed for a sliding window of 20", "asks for 30", "sliding='exact'")


def test_settings_of_single_layers():
    model = patched(tiny("gemma3_text"), "turbo", layers={"0": {"method": "int8"}})
    model(IDS)
    assert [row["method"] for row in report(model).to_dict()["layers"]] == ["int8", "turbo"]


def test_crop_is_checked_in_all_layers_before_any_changes():
    model = patched(tiny("gemma2"))
    cache = model(IDS.repeat(1, 3)).past_key_values
    refused(lambda: cache.crop(-500), UnsupportedError, "cannot crop 500", "window of 20")
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {3 * PROMPT}
    want = model(IDS[:, :9], past_key_values=copy.deepcopy(cache)).logits
    model(IDS[:, 20:40], past_key_values=cache)
    cache.crop(-20)
    assert torch.equal(model(IDS[:, :9], past_key_values=cache).logits, want)


@pytest.mark.slow
def test_compiled_steps_pass_the_capacity():
    """They cannot ask whether a layer is full, so blocks move inside them; a compiled prompt is refused."""
    model = patched(tiny("gemma3_text"), "int8")
    ids = IDS.repeat(1, 3)
    plain, compiled = (QAttnCache.for_model(model, max_cache_len=600) for _ in range(2))
    for cache in (plain, compiled):
        model(ids[:, :376], past_key_values=cache)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for i in range(376, 390):  # a window moves its blocks when it has 384 tokens
        want = model(ids[:, i : i + 1], past_key_values=plain).logits
        got = call(ids[:, i : i + 1], past_key_values=compiled).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)  # another order of fp32 sums
    assert (compiled.layers[0].state["closed"] < compiled.layers[1].state["closed"]).all()
    with pytest.raises(Exception, match="compiled call of 40 tokens"):
        call(ids[:, 390:430], past_key_values=compiled)


@pytest.mark.parametrize("sliding", ["packed", "exact"])
def test_steps_are_captured_once(fake, sliding, monkeypatch):
    """Blocks move between replays, at their addresses; a model whose layers are all packed is captured as any."""
    in_packed_cache(monkeypatch)
    model = tiny("gemma3_text")
    want = model.generate(IDS, **GREEDY)
    patched(as_on_a_gpu(model), sliding=sliding)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), want)
        assert report(model).to_dict()["decode"] == "graph"
    assert fake.captured == 1


def test_kernels_of_a_window_are_compiled_ahead():
    """Calls of such a layer have kernels that are compiled for a window."""
    spec = dataclasses.replace(patched(tiny("mistral"), "turbo")._qattn.specs[0], impl="triton")
    shape = LayerShape(spec, 4, 2, 64, torch.bfloat16, torch.device("cpu"), window=WINDOW)
    sizes = [x for one in launches(shape) for x in (*one.arguments, *one.options.values())]
    assert {x.LOCAL for x in sizes if isinstance(x, Sizes)} == {True}
    assert {x.LOCAL_WINDOW for x in sizes if isinstance(x, PrefillSizes)} == {WINDOW}


def test_scores_of_a_window_are_the_layers_own():
    """A caller's `Scores` need not know the window."""
    model = patched(tiny("mistral"))
    layer = QAttnCache.for_model(model).layers[0]
    q = torch.randn(1, 2, 300, 16)
    span = torch.tensor([[0, 300]], dtype=torch.int32)
    out = layer.attend(q, layer.update(q, q)[0], span, Scores(0.25))[0]
    last = (q[:, :, -1:] @ q[:, :, -WINDOW:].mT * 0.25).softmax(-1) @ q[:, :, -WINDOW:]
    torch.testing.assert_close(out[:, :, -1:], last, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_captured_steps_are_the_eager_ones(family):
    """In kernels, past the capacity of a window's layer, with learned sinks."""
    model, ids = tiny(family, head_dim=64).cuda(), IDS.cuda()
    if family == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # which never asks the device
    greedy = {**GREEDY, "attention_mask": MASK.cuda()}
    want = patched(model, "turbo", decode="eager").generate(ids, **greedy)
    patched(model, "turbo", decode="graph")
    for _ in range(2):
        out = model.generate(ids, return_dict_in_generate=True, **greedy)
        assert torch.equal(out.sequences, want)
    data, layer = report(model).to_dict(), out.past_key_values.layers[0]
    assert (data["decode"], data["impl"]) == ("graph", "triton")
    assert isinstance(layer, WindowLayer) and (layer.state["block_pos"][:, 0] > 0).all()
