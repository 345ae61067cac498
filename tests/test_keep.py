"""`QAttnCache.keep` and `read`: tokens of a prompt are removed, and their blocks are freed."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICE, feed, make_layer, random_ids, random_qkv, tiny_llama
from small_types import tiny
from test_models import FEW
from transformers import DynamicCache, PreTrainedModel

from qattn_hf import QAttnCache, QAttnError, UnsupportedError, list_methods, patch, report
from qattn_hf.layer import kept

ROOT = Path(__file__).resolve().parent.parent
TOKENS, NEW = 200, 9
EXACT = ("fp8", "int8", "none")  # codes of a token do not depend on its neighbours
METHODS = [name for name in list_methods() if name != "sage2"] + ["sage2", "turbo_rotated", "low3", "turbo:bits=mixed"]


def masks(rows: int, heads: int | None = None, tokens: int = TOKENS) -> torch.Tensor:
    """A random half of the tokens, other numbers of them in each row and head."""
    shape = (rows, tokens) if heads is None else (rows, heads, tokens)
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5


def filled(model: PreTrainedModel, ids: torch.Tensor, **inputs: torch.Tensor) -> QAttnCache:
    cache = QAttnCache.for_model(model)
    with torch.no_grad():
        model(ids, past_key_values=cache, **inputs)
    return cache


def nbytes(cache: QAttnCache) -> int:
    return sum(tensor.nbytes for tensor, _ in cache.state_tensors().values())


def with_masked(ids: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the stock model, whose queries of the new tokens do not see the removed ones. `mask` `[B, Hkv, S]`."""
    model, cache = tiny_llama(), DynamicCache()
    visible = torch.cat([mask, torch.ones(*mask.shape[:2], new.shape[1], dtype=torch.bool)], -1)
    causal = torch.ones(new.shape[1], visible.shape[-1], dtype=torch.bool).tril(ids.shape[1])
    seen = (visible[:, :, None] & causal).repeat_interleave(2, 1)  # for query heads
    at = torch.arange(ids.shape[1], visible.shape[-1])[None].expand(len(ids), -1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        return model(new, past_key_values=cache, attention_mask=seen, position_ids=at).logits


@pytest.mark.parametrize("heads", [None, 2], ids=["rows", "heads"])
def test_later_tokens_see_the_kept_ones_at_their_positions(heads: int | None):
    ids, new, mask = random_ids(2, TOKENS), random_ids(2, NEW, seed=5), masks(2, heads)
    model = patch(tiny_llama(), "none")
    cache = filled(model, ids)
    cache.keep(mask)
    with torch.no_grad():
        found = torch.cat(
            [model(part, past_key_values=cache).logits for part in (new[:, :5], new[:, 5:6], new[:, 6:])], 1
        )
    each = mask[:, None].expand(-1, 2, -1) if heads is None else mask
    torch.testing.assert_close(found, with_masked(ids, new, each), atol=1e-5, rtol=0)  # sums in another order
    assert int(cache.get_seq_length()) == TOKENS + NEW


@pytest.mark.parametrize("method", [m if m in FEW else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_memory_is_freed_for_every_method(method: str):
    model, ids = patch(tiny_llama(), method, family=False), random_ids(2, 700)
    cache = filled(model, ids)
    before, packed = nbytes(cache), report(cache).to_dict()["packed_tokens"]
    cache.keep(masks(2, tokens=700))
    assert nbytes(cache) < before and report(cache).to_dict()["kv_bytes"] == nbytes(cache)
    assert report(cache).to_dict()["packed_tokens"] < packed
    out = model.generate(
        torch.cat([ids, random_ids(2, 3)], 1), past_key_values=cache, max_new_tokens=4, do_sample=False
    )
    assert out.shape == (2, 707) and nbytes(cache) < before
    assert all(int(layer.state["overflow"].max()) == 0 for layer in cache.packed)


@pytest.mark.parametrize(
    "method", [*EXACT, "turbo", "kivi", "nf4", "turboquant", "sage2", "int_flash", "turbo:sink_num=2"]
)
def test_a_kept_token_is_quantized_with_its_new_neighbours(method: str):
    """Formats with one scale per token find the same codes as a layer to which only the kept tokens were given. Others
    round twice: their error at most doubles."""
    name, _, setting = method.partition(":")
    case = (name, {"sink_num": 2} if setting else {})
    (q, k, v), mask = random_qkv(2, TOKENS), masks(2)
    mask = mask.index_fill(1, torch.arange(100, 200), False) | (torch.arange(TOKENS) % 3 == 0)  # alike in both rows
    mask[:] = mask[0]
    layer, alone = make_layer(case, None), make_layer(case, None)
    feed(layer, q, k, v, [TOKENS])
    blocks, once = layer.blocks, [x[:, :, mask[0]] for x in kept.read(layer)]
    [change] = kept.changes_to([layer], mask)
    layer.take(change)
    given = [x[:, :, mask[0]] for x in (q, k, v)]
    feed(alone, *given, [int(mask[0].sum())])
    assert layer.state["closed"].tolist() == alone.state["closed"].tolist() and layer.blocks < blocks
    for two, one, other, exact in zip(read_all(layer), once, read_all(alone), given[1:], strict=True):
        assert (two - exact).norm() <= 2 * (one - exact).norm() + 1e-4
        if name in EXACT:
            torch.testing.assert_close(two, other, atol=1e-6, rtol=1e-6)  # scales may differ in their last bit


def read_all(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer in the order of its tokens, as if these were all its columns."""
    layer.state["columns_seen"].copy_(layer.state["length"][0])
    layer.state["padded"].zero_()
    return kept.read(layer)


@pytest.mark.parametrize("method", ["none", "turbo_rotated", "kivi:rotate_k=hadamard,equalize_k=true", "sage2"])
def test_keys_and_values_are_read_as_the_model_made_them(method: str):
    ids, stock = random_ids(2, TOKENS), DynamicCache()
    attention = torch.ones(2, TOKENS, dtype=torch.long)
    attention[0, :30] = 0
    with torch.no_grad():
        tiny_llama()(ids, past_key_values=stock, attention_mask=attention)
    cache = filled(patch(tiny_llama(), method, family=False), ids, attention_mask=attention)
    keys, values = cache.read(0)
    assert not keys[0, :, :30].any() and not values[0, :, :30].any()
    for found, want in ((keys, stock.layers[0].keys), (values, stock.layers[0].values)):
        real = attention.bool()[:, None, :, None]
        error = ((found - want) * real).norm() / (want * real).norm()
        assert error < (1e-5 if method == "none" else 0.2), "far from the model's keys: 4 bits lose about a tenth"


def test_padding_on_the_left_stays_out():
    ids, attention = random_ids(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    attention[0, :50] = 0
    model, mask = patch(tiny_llama(), "none"), masks(2)
    together = filled(model, ids, attention_mask=attention)
    together.keep(mask)
    alone = filled(model, ids[:1, 50:])
    alone.keep(mask[:1, 50:])
    new = random_ids(1, 4)
    with torch.no_grad():
        one = model(new, past_key_values=alone).logits
        seen = torch.cat([attention, torch.ones(2, 4, dtype=torch.long)], 1)
        both = model(new.expand(2, -1), past_key_values=together, attention_mask=seen).logits
    torch.testing.assert_close(both[:1], one, atol=1e-5, rtol=0)


def test_each_layer_has_its_mask_and_a_pruned_cache_is_saved_copied_and_cropped(tmp_path: Path):
    model, ids = patch(tiny_llama(), "turbo"), random_ids(1, TOKENS)
    cache = filled(model, ids)
    cache.keep([masks(1, 2), masks(1, 2).flip(-1)])
    lengths = [int(layer.state["length"][0]) for layer in cache.packed]
    assert lengths == [int(mask.sum(-1).max()) for mask in (masks(1, 2), masks(1, 2).flip(-1))]
    cache.save(tmp_path / "cache.safetensors")
    loaded, twin, new = QAttnCache.load(tmp_path / "cache.safetensors", model), copy.deepcopy(cache), random_ids(1, 5)
    with torch.no_grad():
        found = [model(new, past_key_values=one).logits for one in (cache, loaded, twin)]
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        cache.crop(-4)
        again = model(new[:, 1:], past_key_values=cache).logits
    torch.testing.assert_close(again, found[0][:, 1:])
    with pytest.raises(UnsupportedError, match="before `keep`"):
        cache.crop(-20)


def test_a_head_may_keep_nothing_and_numbers_that_were_not_finite_stay_masked():
    layer, (q, k, v) = make_layer(("int8", {}), None), random_qkv(1, TOKENS)
    k[0, 1, 8] = torch.nan
    feed(layer, q, k, v, [TOKENS])
    mask = torch.zeros(1, 2, TOKENS, dtype=torch.bool)
    mask[0, 1, :10] = True
    layer.take(kept.changes_to([layer], mask)[0])
    assert layer.state["length"].tolist() == [9] and layer.state["nonfinite"].tolist() == [[0, 1]]
    out = feed(layer, q[:, :, :1], k[:, :, :1], v[:, :, :1], [1])
    torch.testing.assert_close(out[0, :2, 0], v[0, :1, 0].expand(2, -1), atol=0.02, rtol=0)  # its own value alone


@pytest.mark.gpu
@pytest.mark.product("int8")
@pytest.mark.parametrize("method", ["int8", "turbo"])
def test_kernels_go_on_with_what_the_reference_wrote(method: str):
    layers, outputs = [], []
    q, k, v = (x.to(DEVICE) for x in random_qkv(1, 140, dim=64))
    for impl in ("triton", "reference"):
        layer = make_layer((method, {}), None)
        layer.spec = replace(layer.spec, impl=impl)
        feed(layer, q[:, :, :130], k[:, :, :130], v[:, :, :130], [130])
        layer.take(kept.changes_to([layer], masks(1, tokens=130))[0])
        outputs.append(feed(layer, q[:, :, 130:], k[:, :, 130:], v[:, :, 130:], [10]))
        layers.append(layer)
    for name, (tensor, _) in layers[0].state_tensors().items():
        assert torch.equal(tensor, layers[1].state_tensors()[name][0]), name
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert error < 0.02, "INT8 queries and weights round within a percent"


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_scores_are_those_of_the_papers(monkeypatch: pytest.MonkeyPatch, model_type: str):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    scores = importlib.import_module("token_scores")
    ids, stock = random_ids(1, TOKENS), tiny(model_type)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        out = stock(ids, output_attentions=True)
    model = patch(tiny(model_type), "none", family=False)
    with pytest.raises(UnsupportedError):
        scores.key_norms(QAttnCache.for_model(model))  # nothing is read yet
    with scores.last_queries(model) as queries:
        cache = filled(model, ids)
    assert len(queries) == len(cache.layers)
    norms, observed = scores.key_norms(cache), scores.observed_attention(cache, queries)
    kinds = getattr(stock.config, "layer_types", None) or ["full_attention"] * len(queries)
    assert [one is not None for one in norms] == [kind == "full_attention" for kind in kinds]
    for weights, found, norm, layer in zip(out.attentions, observed, norms, out.past_key_values.layers, strict=True):
        if norm is None:
            assert found is None
            continue
        want = weights[:, :, -scores.WINDOW :].unflatten(1, (norm.shape[1], -1)).mean((2, 3))
        smooth = torch.nn.functional.avg_pool1d(want, scores.SMOOTHED, 1, scores.SMOOTHED // 2)
        torch.testing.assert_close(found, smooth, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(norm, -layer.keys.norm(dim=-1), atol=1e-5, rtol=1e-5)
    mask = scores.best(norms, 0.25)
    pruned = [one for one in mask if one is not None]
    assert all(bool((one.sum(-1) == TOKENS // 4).all()) and bool(one[..., -scores.WINDOW :].all()) for one in pruned)
    cache.keep(mask)
    assert {int(layer.state["length"]) for layer in cache.packed} == {TOKENS // 4}


@pytest.mark.slow
def test_the_measurement_of_pruned_prompts_runs(capsys: pytest.CaptureFixture):
    script = importlib.import_module("pruning")
    script.main(["--rows", "2", "--prompt", "100", "--after", "40", "--methods", "none;turbo", "--shares", "0.5"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["method"], row["scorer"]) for row in rows[:3]] == [
        ("none", "all"), ("none", "norms"), ("none", "attention")
    ]  # fmt: skip
    assert rows[0]["kl"] == 0 and rows[0]["kv_bytes"] > rows[1]["kv_bytes"] == rows[2]["kv_bytes"]


@pytest.mark.slow
def test_the_measurement_of_pass_keys_runs(tmp_path: Path, capsys: pytest.CaptureFixture):
    book = tmp_path / "book.txt"
    book.write_text("It was a quiet evening, and nobody spoke. " * 40)
    asked = ["--keys", "2", "--prompt", "300", "--methods", "turbo", "--shares", "0.5"]
    importlib.import_module("pruned_keys").main(["--book", str(book), *asked])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["scorer"], row["share"], row["asked"]) for row in rows] == [
        ("all", 1.0, 2), ("norms", 0.5, 2), ("attention", 0.5, 2)
    ]  # fmt: skip


def test_a_pass_key_is_found_if_the_model_writes_all_of_it():
    script = importlib.import_module("pruned_keys")
    model = patch(tiny_llama(), "none")
    prompt = random_ids(1, 40)
    greedy = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 40:].tolist()
    wrong = [*greedy[:3], (greedy[3] + 1) % model.config.vocab_size]
    for key, count in ((greedy, 2), (wrong, 0)):
        found = list(script.found_keys(model, [script.Needle(prompt[0].tolist(), key)] * 2, []))
        assert found == [{"scorer": "all", "share": 1.0, "pass_keys": count, "asked": 2}]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(2, TOKENS), "takes a bool mask"),
        (torch.ones(2, TOKENS - 1, dtype=torch.bool), r"bool mask \[2, 200\] or \[2, 2, 200\]"),
        (torch.zeros(2, TOKENS, dtype=torch.bool), "row 0 has none"),
        ([torch.ones(2, TOKENS, dtype=torch.bool)], "one for each of 2 layers, and got 1"),
    ],
)
def test_other_masks_are_refused_and_nothing_changes(mask: Any, said: str):
    cache = filled(patch(tiny_llama(), "int8"), random_ids(2, TOKENS))
    before = {name: tensor.clone() for name, (tensor, _) in cache.state_tensors().items()}
    with pytest.raises(QAttnError, match=said):
        cache.keep(mask)
    assert all(torch.equal(before[name], tensor) for name, (tensor, _) in cache.state_tensors().items())


def test_other_caches_are_refused():
    model, mask = patch(tiny_llama(), "int8"), masks(1)
    with pytest.raises(UnsupportedError, match="the cache is empty: read a prompt first"):
        QAttnCache.for_model(model).keep(mask)
    cache = filled(model, random_ids(1, TOKENS))
    cache.keep(mask)
    with pytest.raises(UnsupportedError, match="keep removed some before"):
        cache.keep(mask)
    attention = torch.ones(1, TOKENS, dtype=torch.long)
    attention[0, -5:] = 0
    with pytest.raises(UnsupportedError, match="padding on the right"):
        filled(model, random_ids(1, TOKENS), attention_mask=attention).keep(mask)
    windowed = filled(patch(tiny("mistral"), "int8", sliding="packed"), random_ids(1, TOKENS))
    for masks_of in (mask, [mask] * len(windowed.layers)):
        with pytest.raises(UnsupportedError, match="WindowLayer cannot be read or pruned"):
            windowed.keep(masks_of)


def test_latents_are_kept_too():
    model, ids = patch(tiny("deepseek_v3"), "int8"), random_ids(1, TOKENS)
    cache, mask = filled(model, ids), masks(1)
    keys, latents = cache.read(0)
    cache.keep(mask)
    assert keys.shape[1] == latents.shape[1] == 1 and int(cache.layers[0].state["length"]) == int(mask.sum())
    more = torch.cat([ids, random_ids(1, 3)], 1)
    assert model.generate(more, past_key_values=cache, max_new_tokens=2, do_sample=False).shape == (1, TOKENS + 5)


def test_a_fixed_capacity_stays():
    model, ids = patch(tiny_llama(), "int8"), random_ids(1, TOKENS)
    cache = QAttnCache.for_model(model, max_cache_len=TOKENS)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        capacity = cache.layers[0].capacity
        cache.keep(masks(1))
        model(ids[:, :50], past_key_values=cache)  # into the room of the removed tokens
    assert cache.layers[0].capacity == capacity and int(cache.get_seq_length()) == TOKENS + 50


@pytest.mark.parametrize("sliding", ["exact", "packed"])
def test_layers_with_a_window_stay(sliding: str):
    stock, ids, new, mask = tiny("gemma3_text"), random_ids(1, TOKENS), random_ids(1, NEW, seed=5), masks(1)
    kinds, window = stock.config.layer_types, stock.config.sliding_window
    cache, at = DynamicCache(config=stock.config), torch.arange(TOKENS, TOKENS + NEW)[None]
    column = torch.arange(TOKENS + NEW)
    full = torch.cat([mask[0], torch.ones(NEW, dtype=torch.bool)]) & (column <= at[0, :, None])
    with torch.no_grad():
        stock(ids, past_key_values=cache)
        held = next(layer.keys.shape[2] for layer, kind in zip(cache.layers, kinds, strict=True) if "sliding" in kind)
        near = (column <= at[0, :, None]) & (column > at[0, :, None] - window)
        seen = {"full_attention": full[None, None], "sliding_attention": near[None, None, :, TOKENS - held :]}
        want = stock(new, past_key_values=cache, attention_mask=seen, position_ids=at).logits
    model = patch(tiny("gemma3_text"), "none", sliding=sliding, family=False)
    packed = filled(model, ids)
    with pytest.raises(UnsupportedError, match="give None for layers that have a window"):
        packed.read(kinds.index("sliding_attention"))
    packed.keep(mask)
    with torch.no_grad():
        torch.testing.assert_close(model(new, past_key_values=packed).logits, want, atol=1e-4, rtol=0)
