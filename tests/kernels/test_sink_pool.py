"""The sink pool against plain Python lists, and against what the papers say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, attention_fp64, feed, make_layer, random_qkv, same_state

from qattn_hf import RecipeError, load_recipe
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.recipes.recipe import find_recipe
from qattn_kernels.layer.state import side_of
from qattn_kernels.ops.sink_pool.table import read_sinks
from qattn_kernels.reference.rows import bits_to_bool

SMALL = {"group_size": 32, "residual_length": 0, "sink_num": 3, "sink_window": 4, "sink_skip_layers": 0}


def lists(norms: torch.Tensor, block: int, num: int, window: int) -> tuple[set[int], list[int], set[int]]:
    """Pool, window (oldest first) and what was written back, after all whole blocks of `norms` `[tokens]`."""
    pool: list[int] = []
    evicted: list[int] = []
    written: set[int] = set()
    for start in range(0, len(norms) // block * block, block):
        ranked = sorted([*pool, *range(start, start + block)], key=lambda t: (norms[t].item(), t))
        evicted += sorted(t for t in pool if t not in ranked[:num])
        pool = ranked[:num]
        while len(evicted) > window:
            written.add(evicted.pop(0))
    return set(pool), evicted, written


def table(layer: QAttnLayer, head: int) -> dict[str, torch.Tensor]:
    return {name: t[0, head] for name, t in side_of(layer.state, "sink").items()}


@pytest.mark.parametrize("cuts", [[400], [100, *range(117, 400, 17), 400]], ids=["at once", "in pieces"])
@pytest.mark.parametrize("case", [("sinkq", SMALL), ("turbo", {"sink_num": 2, "sink_window": 1})])
def test_the_table_is_what_lists_say(case, cuts):
    qkv = random_qkv(1, 400)
    layer = make_layer(case)
    feed(layer, *qkv, cuts)
    pool, block = layer.spec.sink_pool, layer.spec.window.block
    flags = bits_to_bool(layer.state["dropped"]).flatten(2)[0]
    for head in range(2):
        found = table(layer, head)
        there, evicted = (found["born"] > 0) & (found["written"] == 0), found["evicted"] > 0
        inside, outside, written = lists(qkv[1][0, head].double().abs().sum(-1), block, pool.num, pool.window)
        assert set(found["pos"][there & ~evicted].tolist()) == inside
        assert set(found["pos"][there & evicted].tolist()) == set(outside)
        assert set(flags[head].nonzero().flatten().tolist()) == inside | set(outside)
        assert written, "something must come back for this to be a test"


def masses(q: torch.Tensor, k: torch.Tensor, block: int, residual: int) -> torch.Tensor:
    """Attention that each token of one KV head got until its block closed: `q` `[G, tokens, D]`, `k` `[tokens, D]`."""
    got = torch.zeros(len(k), dtype=torch.float64)
    for i in range(len(k)):
        first = max(0, i - residual) // block * block  # older ones are packed
        weights = (q[:, i].double() @ k[first : i + 1].double().T * q.shape[-1] ** -0.5).softmax(-1)
        got[first : i + 1] += weights.mean(0)
    closed = (len(k) - residual) // block * block
    return got[:closed]


@pytest.mark.parametrize("residual", [0, 20])
@pytest.mark.parametrize("cuts", [[250], [100, *range(117, 250, 17), 250]], ids=["at once", "in pieces"])
def test_sinks_by_attention_are_those_that_got_most(residual: int, cuts: list[int]):
    q, k, v = random_qkv(1, 250)
    q = 3 * q  # peaked, so that more than the first tokens, which meet few others, get much
    layer = make_layer(("paper_sinkq", {**SMALL, "sink_select": "attention", "residual_length": residual}))
    feed(layer, q, k, v, cuts)
    for head in range(2):
        found = table(layer, head)
        got = masses(q[0, 2 * head : 2 * head + 2], k[0, head], 32, residual)
        inside, outside, _ = lists(-got, 32, 3, 4)
        there, evicted = (found["born"] > 0) & (found["written"] == 0), found["evicted"] > 0
        assert set(found["pos"][there & ~evicted].tolist()) == inside
        assert set(found["pos"][there & evicted].tolist()) == set(outside)
        assert outside, "something must leave the pool for this to be a test"


def test_a_sink_that_draws_attention_enters_the_pool_wherever_it_stands():
    q, k, v = with_sink()
    k[:, :, 75], k[:, :, 0] = k[:, :, 0], k[:, :, 1].clone()
    layer = make_layer(("paper_sinkq", {**SMALL, "sink_select": "attention"}))
    feed(layer, q, k, v, [128])
    for head in range(2):
        found = table(layer, head)
        assert 75 in found["pos"][(found["born"] > 0) & (found["evicted"] == 0)].tolist()


def test_sinks_stand_as_they_came_and_equal_ones_stay_the_oldest():
    q, k, v = random_qkv(1, 64)
    k[:, :, 5] = k[:, :, 9] = k[:, :, 40] = k[:, :, 33] = 0.0
    layer = make_layer(("sinkq", SMALL))
    feed(layer, q, k, v, [64])
    found = table(layer, 0)
    inside = (found["born"] > 0) & (found["evicted"] == 0)
    assert sorted(found["pos"][inside].tolist()) == [5, 9, 33]
    assert 40 not in found["pos"].tolist()
    for side, x, fmt in (("k", k, layer.spec.k), ("v", v, layer.spec.v)):
        kept = read_sinks(side_of(layer.state, side), fmt).x[0, 0]
        assert torch.equal(kept[found["pos"].tolist().index(9)], x[0, 0, 9])


def test_leaving_a_key_out_is_replacing_it_by_the_mean():
    """All other tokens have the codes and scales of a block with the mean in place of its sinks, as in the paper."""
    q, k, v = random_qkv(1, 32)
    k[0, :, 7] = 1e-3
    k[..., 3] += 20  # a channel far from zero, which the sink would stretch
    replaced = k.clone()
    others = [t for t in range(32) if t != 7]
    replaced[:, :, 7] = k[:, :, others].mean(2)
    pooled, plain = make_layer(("sinkq", {**SMALL, "sink_num": 1})), make_layer(("sinkq", {**SMALL, "sink_num": 0}))
    feed(pooled, q, k, v, [32])
    feed(plain, q, replaced, v, [32])
    for name in ("k.scale", "k.zero_point"):
        assert torch.equal(pooled.state[name], plain.state[name])
    read = [layer.spec.k.read(side_of(layer.state, "k"), 1).x[:, :, 0, others] for layer in (pooled, plain)]
    assert torch.equal(*read)


def test_what_comes_back_is_read_clamped_from_its_codes():
    layer = make_layer(("sinkq", {**SMALL, "sink_num": 1, "sink_window": 0, "bits": 4}))
    q, k, v = random_qkv(1, 64)
    k[0, :, 7], k[0, :, 40] = 0.02, 0.01
    feed(layer, q, k, v, [32])
    assert bits_to_bool(layer.state["dropped"])[0, 0, 0].nonzero().flatten().tolist() == [7]
    feed(layer, *(x[:, :, 32:] for x in (q, k, v)), [32])
    assert not bits_to_bool(layer.state["dropped"])[0, 0, 0].any()
    back = layer.spec.k.read(side_of(layer.state, "k"), 1).x[0, 0, 0]
    others = k[0, 0, [t for t in range(32) if t != 7]]
    scale = layer.state["k.scale"][0, 0, 0].float()
    want = torch.maximum(torch.minimum(k[0, 0, 7], others.amax(0)), others.amin(0))
    assert ((back[7] - want).abs() <= scale * 0.51).all()  # half a scale, and fp16's rounding of the scale itself


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"sink_window": 32}, {"crop_horizon": 200}], ids=str)
def test_kernels_compute_a_table_of_any_size(settings: dict[str, int]):
    """Entries that are no power of two by themselves: with a large window, or with many blocks that a crop reopens."""
    qkv = [x.to(DEVICE) for x in random_qkv(1, 64, dim=64)]
    layers = [make_layer(("sinkq", {**SMALL, "sink_num": 8, **settings}), 64) for _ in range(2)]
    layers[1].spec = replace(layers[1].spec, impl="triton")
    for layer in layers:
        feed(layer, *qkv, [33, 64])
        layer.crop(-20)
    assert layers[0].state["sink.born"].any() and same_state(*layers) == []


@pytest.mark.gpu
def test_a_block_meets_the_pool_once():
    """One program of an append closes the block in front of a residual window; another one only rotates queries."""
    qkv = [x.to(DEVICE) for x in random_qkv(1, 50, dim=64)]
    rotated = ("sinkq", {**SMALL, "residual_length": 8, "rotate_k": "hadamard"})
    layers = [make_layer(rotated, 64) for _ in range(2)]
    layers[1].spec = replace(layers[1].spec, impl="triton")
    for layer in layers:
        feed(layer, *qkv, [38, *range(39, 42)])
    assert layers[0].state["sink.born"].any() and same_state(*layers) == []


def with_sink(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a first token as in large models.

    It has a small value and a small key that draws most of the attention, because one channel is large in all other
    keys and lowers their scores.
    """
    q, k, v = random_qkv(1, 128, seed=seed)
    k[..., 5] += 6
    q[..., 5] = -6.0
    k[:, :, 0], v[:, :, 0] = k[:, :, 0] * 0.05, v[:, :, 0] * 0.1
    return q, k, v


def output_error(case, qkv) -> float:
    out = feed(make_layer(case), *qkv, [64, *range(84, 128, 20), 128])[:, :, 64:]
    exact = attention_fp64(*qkv)[:, :, 64:]
    return ((out - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("case", [("sinkq", {**SMALL, "bits": 2}), ("turbo", {"bits": 2, "sink_num": 3})])
def test_a_pool_helps_where_sinks_are(case):
    qkv = with_sink()
    without = (case[0], {**case[1], "sink_num": 0})
    assert output_error(case, qkv) < 0.75 * output_error(without, qkv)


@pytest.mark.parametrize(
    ("settings", "other"),
    [({"sink_select": "largest_key"}, True), ({"sink_select": "random"}, True), ({"sink_exclude": False}, False)],
)
def test_variants_of_the_papers_ablation(settings, other):
    """Its Fig. 1(f): other tokens are chosen, or the same ones whose block still feels them; the default errs less."""
    qkv = with_sink(seed=1)
    layers = [make_layer(("paper_sinkq", {**SMALL, **change})) for change in ({}, settings)]
    for layer in layers:
        feed(layer, *qkv, [128])
    assert torch.equal(*(layer.state["sink.pos"] for layer in layers)) is not other
    assert not torch.equal(*(layer.state["k.scale"] for layer in layers))
    assert output_error(("sinkq", SMALL), qkv) < output_error(("paper_sinkq", {**SMALL, **settings}), qkv)


def test_the_papers_pool_is_filled_by_the_whole_prompt():
    qkv = random_qkv(1, 400)
    layer = make_layer(("paper_sinkq", {**SMALL, "sink_prefill": "whole"}))
    feed(layer, *qkv, [390])
    norms = qkv[1][0, :, : 390 // 32 * 32].double().abs().sum(-1)
    for head in range(2):
        found = table(layer, head)
        assert set(found["pos"][found["born"] > 0].tolist()) == set(norms[head].argsort()[:3].tolist())
        assert (found["evicted"] == 0).all()


def test_the_papers_pool_leaves_only_its_own_out_of_the_scales():
    """Tokens that were in it for some blocks and are not in the end count in the statistics of theirs."""
    q, k, v = random_qkv(1, 400)
    layer = make_layer(("paper_sinkq", {**SMALL, "sink_prefill": "whole"}))
    feed(layer, q, k, v, [390])
    for head in range(2):
        found = table(layer, head)
        others = torch.ones(384, 1, dtype=torch.bool)
        others[found["pos"][found["born"] > 0]] = False
        x = k[0, head, :384]
        low = torch.where(others, x, torch.inf).view(12, 32, -1).amin(1)
        assert torch.equal(layer.state["k.zero_point"][0, head, :12], low.half())


@pytest.mark.parametrize("cuts", [[64], [50, *range(51, 65)]], ids=["prefill", "steps"])
def test_a_sink_with_a_spike_does_not_raise_the_scale_of_its_block(cuts: list[int]):
    """The smallest by the sum of its channels may have the largest of them."""
    q, k, v = random_qkv(1, 64)
    k = k.sign()
    k[:, :, 9] = 0.0
    k[:, :, 9, 4] = 12.0
    layer = make_layer(("turbo", {"sink_num": 1}))
    feed(layer, q, k, v, cuts)
    assert (table(layer, 0)["pos"] == 9).any()
    torch.testing.assert_close(layer.state["k.scale"][0, :, 0], torch.full((2,), 1 / 119))


def test_first_layers_have_no_pool():
    specs = [find_recipe("sinkq", None, {}).settings.layer_spec(i, 4, 2).sink_pool.num for i in range(4)]
    assert specs == [0, 0, 3, 3]


def test_formats_without_open_tokens_have_no_pool():
    with pytest.raises(RecipeError, match="unknown key 'sink_num'"):
        find_recipe("int8", None, {"sink_num": 3})


def test_turbo_with_a_pool_is_a_recipe():
    settings = load_recipe("turbo_sink").settings
    assert (settings.name(), settings.bits, settings.sink_num, settings.sink_window) == ("turbo", 4, 3, 8)
