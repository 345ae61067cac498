"""Layers that attend to the keys and values of an earlier layer (Gemma 3n and 4): packed once, read by all."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from fake_graphs import as_on_a_gpu, path
from helpers import FIXED, Case, case_id, cases, make_layer, random_qkv
from refusals import refused
from small_types import SHARED_KEYS, WINDOW, tiny
from test_window_layer import WITHOUT_SINKS, windowed
from torch._inductor.utils import run_and_get_code
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, RecipeError, UnsupportedError, patch, report, unpatch
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.planning.check import check
from qattn_kernels.layer.scores import Scores

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore:nothing is packed")]

KINDS = SHARED_KEYS["layer_types"]
TYPES = ["gemma3n_text", "gemma4_text"]
GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}  # past a block
IDS = torch.randint(3, 90, (2, 120), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :11] = 0
# prompts and steps; a prompt longer than a window, steps past a window's capacity, a later prompt
CALLS = (150, 1, 40, 3, 1, 300, 32, 100, 1)
# what depends on queries is that of the last reader: sparse V's counters, and sinks that are chosen by attention
OF_QUERIES = ("v_read", "v_skipped", "v_queries", "v_dropped", "v_worst")


def model_of(family: str, layers: int = 6) -> PreTrainedModel:
    """The last two layers read the keys and values of the two before them."""
    return tiny(family, num_hidden_layers=layers, **{**SHARED_KEYS, "layer_types": KINDS[:layers]})


def patched(family: str, method: str = "none", **settings: Any) -> PreTrainedModel:
    return patch(model_of(family), method, impl="reference", family=False, **settings)


def called(layer: QAttnLayer, qkv: Any, part: slice, padding: int, readers: int) -> list[torch.Tensor]:
    """Outputs of the layer itself and of readers after it, whose queries are others."""
    q, k, v = (x[:, :, part] for x in qkv)
    span = torch.tensor([[0, q.shape[2]]] * len(q), dtype=torch.int32)
    span[0] += torch.tensor([padding, -padding], dtype=torch.int32)
    handle, scores, span = layer.update(k, v)[0], Scores(q.shape[-1] ** -0.5), span.to(q.device)
    turned = [q.roll(i, 1) * (1 + i) for i in range(1 + readers)]
    return [layer.attend(query, handle, span, scores, unpadded=not padding)[0] for query in turned]


def check_readers(
    layer: QAttnLayer, alone: QAttnLayer, others: list[QAttnLayer], qkv: Any, calls: tuple[int, ...] = CALLS
) -> None:
    """Check that readers of `layer` attend as `others` do, layers with separate caches, and store nothing."""
    layer.shared, start = True, 0
    for tokens in calls:
        part, padding = slice(start, start + tokens), 13 if start == 0 and len(calls) > 2 else 0
        got = called(layer, qkv, part, padding, len(others))
        (want,) = called(alone, qkv, part, padding, 0)
        assert torch.equal(got[0], want)
        for i, other in enumerate(others):
            turned = (qkv[0].roll(1 + i, 1) * (2 + i), *qkv[1:])
            assert torch.equal(got[1 + i], called(other, turned, part, padding, 0)[0])
        start += tokens
        differing = [name for name, x in alone.state.items() if not torch.equal(x, layer.state[name])]
        assert [name for name in differing if name not in OF_QUERIES] == []
        assert (layer._used, layer.edits, layer.blocks) == (alone._used, alone.edits, alone.blocks)


CASES = [case for case in [*cases(), *FIXED] if case[1].get("sink_select") != "attention" and "memory" not in case[1]]


@pytest.mark.product("turbo", "kivi", "sinkq")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_readers_attend_as_with_a_copy_of_their_own(case: Case):
    layer, alone, *others = (make_layer(case, None) for _ in range(4))
    check_readers(layer, alone, others, random_qkv(2, sum(CALLS)))


@pytest.mark.product("turbo")
@pytest.mark.parametrize("case", WITHOUT_SINKS, ids=case_id)
def test_readers_of_a_window(case: Case):
    layer, alone, *others = (windowed(case, WINDOW) for _ in range(4))
    check_readers(layer, alone, others, random_qkv(2, sum(CALLS)))


@pytest.mark.parametrize("sliding", ["exact", "packed"])
@pytest.mark.parametrize("family", TYPES)
def test_they_hold_nothing_and_give_the_stock_tokens(family: str, sliding: str):
    """The prompt may compute only the last token of these layers."""
    stock, model = model_of(family), patched(family, sliding=sliding)
    want = stock.generate(IDS, attention_mask=MASK, **GREEDY)
    out = model.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, want)
    held = [row["bytes"] for row in report(out.past_key_values).to_dict()["layers"]]
    assert all(held[:4]) and not any(held[4:])
    rows = report(model).to_dict()["layers"]
    assert [row["own"] for row in rows[4:]] == ["keys and values of layer 2", "keys and values of layer 3"]
    text = str(report(model))
    assert "keys and values of layer 3" in text and ("layers are not packed" in text) == (sliding == "exact")
    assert torch.equal(unpatch(model).generate(IDS, attention_mask=MASK, **GREEDY), want)


@pytest.mark.parametrize("sliding", ["exact", "packed"])
def test_check_counts_what_is_packed_once(sliding: str):
    model = model_of("gemma4_text").to(torch.bfloat16)
    model.config.dtype = model.dtype
    found = check(model.config, "int8", device_type="cpu", at_tokens=128, settings={"sliding": sliding})
    assert found.refused is None and [row["bytes"] for row in found.layers[4:]] == [0, 0]
    per_token = sum(row["bytes_per_token"] for row in found.layers)
    assert found.bytes_per_token == per_token and found.bytes_per_token_full_precision == 2 * 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("sliding", ["exact", "packed"])
def test_a_reader_that_fails_leaves_the_call_before(sliding: str, tokens: int):
    model = patched("gemma3n_text", "turbo", sliding=sliding)
    cache = model(IDS).past_key_values
    twin = copy.deepcopy(cache)
    hook = model.model.layers[4].register_forward_hook(lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, :tokens], past_key_values=cache)
    hook.remove()
    for ids in (IDS[:, :tokens], IDS[:, :1], IDS[:, :40]):
        assert torch.equal(*(model(ids, past_key_values=each).logits for each in (cache, twin)))


@pytest.mark.slow
def test_captured_steps(fake):
    """With packed windows every layer is packed, so steps are captured."""
    model = as_on_a_gpu(model_of("gemma3n_text"))
    how = {"impl": "reference", "family": False, "sliding": "packed"}
    want = patch(model, "turbo", decode="eager", **how).generate(IDS, attention_mask=MASK, **GREEDY)
    patch(model, "turbo", **how)
    for _ in range(2):  # the second cache takes the memory and the steps of the first
        assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), want)
        assert path(model) == ("graph", None)
    assert fake.captured == 1 and fake.replayed > GREEDY["max_new_tokens"]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compiled_steps_copy_no_arena():
    """Of windows and of layers that others read. Inductor would, if a step changed one by two operators."""
    how = {"impl": "reference", "family": False, "sliding": "packed", "decode": "compile"}
    model = patch(model_of("gemma4_text", 4), "int8", **how)
    cache, twin = (QAttnCache.for_model(model, max_cache_len=200) for _ in range(2))
    for each in (cache, twin):
        model(IDS, past_key_values=each)
    step, codes = torch.compile(model, fullgraph=True), list[str]()
    for token in IDS[:, :3].split(1, 1):
        out, found = run_and_get_code(step, token, past_key_values=cache)
        codes += found
        want = model(token, past_key_values=twin).logits
        torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-4)  # fused sums in fp32
    sizes = {layer.arena.nbytes for layer in cache.packed}
    allocated = [line.strip() for code in codes for line in code.splitlines() if "empty_strided" in line]
    assert allocated and [line for line in allocated if any(f"(({size}, )" in line for size in sizes)] == []


def test_a_saved_cache(tmp_path):
    model = patched("gemma4_text", "turbo", sliding="packed")
    cache = model(IDS).past_key_values
    cache.save(tmp_path / "prefix.safetensors")
    loaded = QAttnCache.load(tmp_path / "prefix.safetensors", model)
    for ids in (IDS[:, :1], IDS[:, :40]):
        assert torch.equal(*(model(ids, past_key_values=each).logits for each in (cache, loaded)))


def test_settings_for_layers_that_only_read_are_refused():
    words = ("layers 4-5 are not packed", "keys and values of layer 2")
    refused(lambda: patched("gemma4_text", "turbo", layers={"4-5": {"bits": 2}}), RecipeError, *words)
    patched("gemma4_text", "turbo", layers={"3-5": {"bits": 2}})


def test_keys_that_a_layer_reads_twice_are_refused():
    """A layer whose sharing is unknown reads the keys of another layer."""
    model = patched("gemma4_text", "turbo")
    cache = QAttnCache.for_model(model)
    cache.layers[5].spec = cache.layers[4].spec  # which reads those of layer 2
    refused(lambda: model(IDS, past_key_values=cache), UnsupportedError, "a second time")
