"""A cache with a memory limit: it never exceeds the limit, and its content equals the same tokens packed at the same
bits."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs, as_on_a_gpu
from helpers import feed, make_layer, random_ids, random_qkv, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from transformers import CompileConfig

from qattn_hf import CapacityError, QAttnCache, RecipeError, UnsupportedError, patch, report
from qattn_hf.generate.cuda_graph import graph
from qattn_hf.generate.patched import Runner
from qattn_hf.layer import changes
from qattn_hf.layer.budget_layer import BudgetLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.memory_budget import SPARE, BudgetLayerSpec, all_stages, arranged, at_stage, stages
from qattn_hf.methods import get_method
from qattn_hf.planning.check import check
from qattn_hf.planning.plan import Planner
from qattn_kernels.layer.arena import Layout, places
from qattn_kernels.layout import Geometry

pytestmark = pytest.mark.usefixtures("no_grad")
PLAIN: dict[str, Any] = {"sink_num": 0}
PIECES = [PLAIN, {**PLAIN, "v_scale": "token", "rotate_k": "hadamard"}, {**PLAIN, "smooth_k": True}, {}]
SIZES = Geometry(2, 2, 32, 32, 1, torch.float32)


def spec_of(memory: int = 10**9, bits: int = 2, **pieces: Any) -> BudgetLayerSpec:
    found = get_method("turbo")(bits=bits, memory=memory, **pieces).last_layer_spec(2)
    assert isinstance(found, BudgetLayerSpec)
    return found


def held(layer: QAttnLayer, blocks: int) -> list[torch.Tensor]:
    """Keys and values of the first blocks as they are read."""
    return [
        fmt.read({name[2:]: x for name, x in layer.state.items() if name[:2] == f"{side}."}, blocks).dequantize()
        for side, fmt in (("k", layer.spec.k), ("v", layer.spec.v))
    ]


def bytes_of(layer: QAttnLayer) -> int:
    assert layer.arena is not None
    return layer.arena.nbytes


def test_values_get_fewer_bits_first_one_side_at_a_time():
    assert stages(spec_of(bits=2)) == [(8, 8), (8, 4), (4, 4), (4, 2), (2, 2)]
    assert stages(spec_of(bits=4)) == [(8, 8), (8, 4), (4, 4)]
    assert stages(spec_of(bits=4, v_bits=2)) == [(8, 8), (8, 4), (4, 4), (4, 2)]
    assert stages(spec_of(bits=4, k_bits=2)) == [(8, 8), (8, 4), (4, 4), (2, 4)]
    ages = [(spec.k.core.ages, spec.v.core.ages) for spec in all_stages(spec_of())]
    assert ages == [(False, True), (True, False), (False, True), (True, False), (False, False)]


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_4_bits_made_of_8_are_those_made_at_once(pieces):
    """FlashQ's stages are nested: every tensor equals that of `turbo` with 4 bits, including masked tokens."""
    qkv = random_qkv(2, 300)
    qkv[1][0, 0, 70] = torch.nan
    late = BudgetLayer(spec_of(bits=4, **pieces), 512)
    at_once = make_layer(("turbo", pieces))
    for layer in (late, at_once):
        feed(layer, *qkv, [150, 151, 300], first=5)
    late.take(changes.repacked(late, at_stage(late.spec, 1, 3), 8))  # some blocks' values, then all keys and values
    late.take(changes.repacked(late, at_stage(late.spec, 2), 8))
    assert [name for name in at_once.state if not torch.equal(late.state[name], at_once.state[name])] == []
    q, k, v = random_qkv(2, 3, seed=1)
    assert torch.equal(feed(late, q, k, v, [3]), feed(at_once, q, k, v, [3]))


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_blocks_keep_their_codes_or_get_those_of_the_next_stage(pieces):
    """At each stage, one side of the first 2 of 4 blocks is recoded, within half a step.

    Everything else is unchanged.
    """
    layer = BudgetLayer(spec_of(**pieces), 512)
    feed(layer, *random_qkv(2, 300), [300])
    spec, last = layer.spec, len(stages(layer.spec)) - 1
    for stage in range(last):
        before, side = held(layer, 4), "kv".index("v" if all_stages(spec)[stage].v.core.ages else "k")
        layer.take(changes.repacked(layer, at_stage(spec, stage, 2), 8))
        after = held(layer, 4)
        assert torch.equal(before[1 - side], after[1 - side])
        assert torch.equal(before[side][:, :, 2:], after[side][:, :, 2:])
        assert not torch.equal(before[side][:, :, :2], after[side][:, :, :2])
        if pieces == PLAIN:  # elsewhere sinks are clamped, and scales are of tokens
            step, scale = (layer.state[f"{'kv'[side]}.{name}"][:, :, :2].float() for name in ("channel_scale", "scale"))
            reach = (step / 2 + (15 if stage < 2 else 3) / 2) * scale[..., None]  # the latter as the step is rounded
            assert ((before[side] - after[side])[:, :, :2].abs() <= 1.001 * reach[..., None, :]).all()
        layer.take(changes.repacked(layer, at_stage(spec, stage + 1), 8))
    assert layer.spec == all_stages(spec)[last]


@given(
    memory=st.integers(20_000, 2_000_000), need=st.integers(1, 200), wish=st.integers(0, 300), rows=st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_an_arrangement_fits_and_has_no_more_aged_blocks_than_it_takes(memory, need, wish, rows):
    spec, geometry = spec_of(memory), replace(SIZES, batch=rows)

    def takes(spec: BudgetLayerSpec, blocks: int) -> int:
        return places(Layout(replace(geometry, blocks=blocks), spec))[1]

    last = all_stages(spec)[-1]
    if takes(last, need) > memory:
        refused(lambda: arranged(spec, geometry, need, max(need, wish)), CapacityError, "Raise memory=")
        return
    found, blocks = arranged(spec, geometry, need, max(need, wish))
    assert takes(found, blocks) <= memory and blocks >= need
    assert blocks <= max(wish, need + need // SPARE)
    if found == all_stages(spec)[0]:
        return
    aged = (found.k.core.aged or 0) + (found.v.core.aged or 0)
    step = stages(spec).index((found.k.core.bits, found.v.core.bits))
    fewer = at_stage(spec, step, aged - 1) if aged else at_stage(spec, step - 1, need + need // SPARE - 1)
    assert takes(fewer, need + need // SPARE) > memory or takes(found, need + need // SPARE) > memory


def test_a_layer_never_takes_more_than_its_memory_and_ends_in_the_fewest_bits():
    """A layer with 2 rows and 2 heads of 32 channels is filled.

    Its outputs equal an 8-bit layer's while there is room, and its bits are always the most that fit.
    """
    spec = spec_of(150_000)
    layer, plenty = BudgetLayer(spec), BudgetLayer(spec_of())
    q, k, v = random_qkv(2, 4096)
    seen, tokens = [], 0
    with pytest.raises(CapacityError, match="Raise memory="):
        while tokens < 4096:
            one = [x[:, :, tokens : tokens + 32] for x in (q, k, v)]
            out = feed(layer, *one, [32])
            if layer.spec == at_stage(spec, 0):
                assert torch.equal(out, feed(plenty, *one, [32]))
            assert bytes_of(layer) <= 150_000
            seen.append((layer.spec.k.core.bits, layer.spec.v.core.bits))
            tokens += 32
    assert list(dict.fromkeys(seen))[:4] == stages(spec)[:4]  # the last would change one block more
    assert int(layer.state["length"][0]) == tokens  # nothing of the call that did not fit was written
    full = 2 * 2 * 2 * 32 * 4 * tokens
    assert full > 4 * 150_000


def test_a_prompt_beyond_its_room_begins_in_fewer_bits():
    one, other = BudgetLayer(spec_of(150_000)), BudgetLayer(spec_of(150_000))
    qkv = random_qkv(1, 1500)
    out = feed(one, *qkv, [1500])
    assert torch.equal(out, feed(other, *qkv, [1500]))  # the same calls, the same bits
    assert one.spec != at_stage(one.spec, 0) and bytes_of(one) <= 150_000


def test_reset_begins_with_8_bits_again():
    layer, qkv = BudgetLayer(spec_of(60_000)), random_qkv(1, 600)
    feed(layer, *qkv, [600])
    assert layer.spec != at_stage(layer.spec, 0)
    layer.reset()
    assert layer.spec == at_stage(layer.spec, 0) and int(layer.get_seq_length()) == 0
    short = [x[:, :, :100] for x in qkv]
    assert torch.equal(feed(layer, *short, [100]), feed(BudgetLayer(spec_of()), *short, [100]))


def test_a_crop_within_the_horizon_is_exact_across_a_repacking():
    layer, twin = BudgetLayer(spec_of(150_000)), BudgetLayer(spec_of(150_000))
    q, k, v = random_qkv(1, 900)
    for one in (layer, twin):
        feed(one, *(x[:, :, :700] for x in (q, k, v)), [700])
    before = layer.spec
    extra = [x[:, :, 700:760] for x in (q, k, v)]
    feed(layer, *extra, [32, 60])
    layer.crop(-60)
    assert layer.spec == before, "the test wants room for the draft"
    following = [x[:, :, 800:900] for x in (q, k, v)]
    assert torch.equal(feed(layer, *following, [1, 30, 100]), feed(twin, *following, [1, 30, 100]))


def test_a_larger_horizon_takes_its_room_from_bits():
    layer, qkv = BudgetLayer(spec_of(100_000)), random_qkv(1, 800)
    feed(layer, *qkv, [800])
    layer.raise_horizon(300)
    assert bytes_of(layer) > 100_000
    feed(layer, *random_qkv(1, 40, seed=2), [40])
    assert bytes_of(layer) <= 100_000 and int(layer.state["length"][0]) == 840


def test_copies_pickles_and_more_rows():
    layer, qkv = BudgetLayer(spec_of(120_000)), random_qkv(1, 800)
    feed(layer, *qkv, [800])
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    following = random_qkv(1, 40, seed=2)
    want = feed(layer, *following, [40])
    assert all(torch.equal(feed(twin, *following, [40]), want) for twin in twins)
    layer.batch_repeat_interleave(2)
    assert layer.batch == 2 and bytes_of(layer) <= 120_000
    assert torch.equal(*layer.state["length"])
    refused(lambda: layer.batch_repeat_interleave(64), CapacityError, "Raise memory=")
    assert layer.batch == 2


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["feed", "feed", "feed", "crop", "crop far", "reorder", "more rows"]), st.integers(1, 120)
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.slow
@given(steps=STEPS, seed=st.integers(0, 99), room=st.integers(60_000, 140_000))
@settings(max_examples=20, deadline=None)
def test_histories_keep_to_the_memory_and_lose_no_more_than_2_bits(steps, seed, room):
    """Calls, near and far crops, reordered and repeated rows, at any bits of the blocks.

    Lengths equal other layers', bytes never exceed the limit, and the total error of outputs is at most that of fixed 2
    bits, plus that of a second rounding.
    """
    pieces = {"rotate_k": "hadamard", "v_scale": "token"}
    budget, fixed = BudgetLayer(spec_of(room, **pieces)), make_layer(("turbo", {"bits": 2, **pieces}), None)
    layers, errors = (budget, fixed, make_layer(("none", {}), None)), [0.0, 0.0]
    for i, (what, n) in enumerate([("feed", 150), *steps]):
        rows, length = budget.batch or 1, int(budget.state["length"][0]) if budget.is_initialized else 0
        order = torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(i))
        try:
            if what == "feed":
                qkv = random_qkv(rows, n, seed=seed + i)
                *outs, exact = (feed(layer, *qkv, [n]) for layer in layers)
                errors = [error + (out - exact).square().sum().item() for error, out in zip(errors, outs, strict=True)]
            for layer in layers if what != "feed" else ():
                if what == "more rows" and rows < 3:
                    layer.batch_repeat_interleave(2)
                elif what == "reorder":
                    layer.reorder_cache(order)
                elif what.startswith("crop") and length > 1:
                    layer.crop(-min(n if what == "crop" else 3 * n, length - 1))
        except CapacityError:  # of the first of the layers, which changed nothing
            break
        assert all(torch.equal(layer.state["length"], budget.state["length"]) for layer in layers)
        assert bytes_of(budget) <= room
    assert bytes_of(budget) <= room and errors[0] <= 1.3 * errors[1]


IDS = random_ids(2, 200)
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=100, min_new_tokens=100)


def kv_bytes(model: Any) -> int:
    return report(model).to_dict()["kv_bytes"]


@pytest.mark.slow
def test_generate_outgrows_its_memory_and_reports_what_it_has():
    """2 rows of 300 tokens take 307 kB in full precision; in 152 kB some of their blocks have fewer than 8 bits."""
    plenty = patch(tiny_llama(), "turbo", memory="1GiB")
    model = patch(tiny_llama(), "turbo", memory=152_000, bits=2)
    first = model.generate(IDS, **GREEDY)
    assert torch.equal(first, model.generate(IDS, **GREEDY))  # deterministic
    assert kv_bytes(model) <= 152_000
    data = report(model).to_dict()
    row = data["layers"][0]
    counts = row["tokens_by_bits"]
    assert counts and all(sum(tokens.values()) == row["packed_tokens"] for tokens in counts.values())
    assert " bits of " in str(report(model)) or all(len(tokens) == 1 for tokens in counts.values())
    plenty.generate(IDS, **GREEDY)
    assert report(plenty).to_dict()["layers"][0]["tokens_by_bits"] == {"v": {8: row["packed_tokens"]}}
    assert data["effective_bits"] < report(plenty).to_dict()["effective_bits"]


def test_bits_are_counted_from_the_blocks_that_are_there():
    """Of 8 closed blocks 3 have values in 4 bits: 32 heads times channels, 64 tokens, 2 ranges of a byte, a scale."""
    layer = BudgetLayer(spec_of(), 1024)
    feed(layer, *random_qkv(1, 512), [512])
    layer.take(changes.repacked(layer, at_stage(layer.spec, 0, 3), 16))
    cache = QAttnCache([layer.spec], patch(tiny_llama(), "turbo")._qattn.recipe)
    cache.layers = [layer]
    codes = 8 * 64 * 64 + (5 * 64 * 64 + 3 * 64 * 32)
    beside = 8 * (2 * 2 * 64 + 2 * 2 * 4 + 2 * 8 + 8)  # ranges, scales, mask bits, position and length
    assert report(cache).to_dict()["effective_bits"] == pytest.approx(8 * (codes + beside) / (512 * 2 * 2 * 32))


def test_too_little_memory_is_said_before_anything_is_written():
    model = patch(tiny_llama(), "turbo", memory=60_000)
    refused(lambda: model.generate(IDS, **GREEDY), CapacityError, "Raise memory=", "lower bits=")
    assert model.generate(IDS[:1, :20], do_sample=False, max_new_tokens=4).shape == (1, 24)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_beams_and_drafts(how):
    ids = IDS[:, :100] if "num_beams" in how else IDS[:1, :100]
    model = patch(tiny_llama(), "turbo", memory=10**9)
    want = model.generate(ids, do_sample=False, max_new_tokens=60, **how)
    memory = 240_000 if "num_beams" in how else 66_000
    tight = patch(tiny_llama(), "turbo", memory=memory, bits=2)
    out = tight.generate(ids, do_sample=False, max_new_tokens=60, **how)
    assert torch.equal(out[:, :101], want[:, :101])  # the first new token; later ones may differ
    assert kv_bytes(tight) <= memory
    assert report(tight).to_dict()["effective_bits"] < 8


@pytest.mark.slow
def test_captured_steps_end_where_bits_change(monkeypatch):
    graphs = FakeGraphs()
    monkeypatch.setattr(graph, "record", graphs.record)
    eager = patch(tiny_llama(), "turbo", memory=152_000, bits=2, decode="eager").generate(IDS, **GREEDY)
    model = as_on_a_gpu(patch(tiny_llama(), "turbo", memory=152_000, bits=2))
    monkeypatch.setattr(model._qattn, "runner", Runner("graph"))
    assert torch.equal(model.generate(IDS, **GREEDY), eager)
    layers = model._qattn.last.cache.layers
    assert graphs.captured > 1 and graphs.replayed > 80
    assert layers[0].spec != at_stage(layers[0].spec, 0)


def test_compiled_steps_that_make_no_room_are_refused():
    model = patch(tiny_llama(), "turbo", memory=152_000, bits=2)
    compiled = CompileConfig(backend="eager")
    compiled._compile_all_devices = True
    how = {**GREEDY, "compile_config": compiled, "disable_compile": False}
    refused(lambda: model.generate(IDS, **how), UnsupportedError, "memory=", "decode='graph'")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"memory": "a lot"}, ("size", "24GiB")),
        ({"memory": 0}, ("too few", "12GiB")),
        ({"memory": "1GiB", "bits": "mixed"}, ("mixed", "bits=4")),
        ({"memory": "1GiB", "sliding": "packed"}, ("windows", "leave them out")),
        ({"memory": "1GiB", "sparse_v_tau": 0.001}, ("sparse_v_tau", "leave them out")),
        ({"memory": "1GiB", "layers": {"0": {"method": "int8"}}}, ("turbo in every", "leave memory out")),
        ({"memory": "1GiB", "layers": {"0": {"memory": "2GiB"}}}, ("memory applies to all layers",)),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(wrong, words):
    refused(lambda: patch(tiny_llama(), "turbo", **wrong), RecipeError, *words)


def test_what_a_memory_is_not_for(tmp_path):
    model = patch(tiny_llama(), "turbo", memory=152_000, bits=2)
    cache = model.generate(IDS, return_dict_in_generate=True, **GREEDY).past_key_values
    refused(lambda: cache.save(tmp_path / "x"), UnsupportedError, "memory=", "bits=")
    planner = Planner(tiny_llama().config, dtype=torch.float32)
    refused(lambda: planner.way("turbo:memory=1GiB"), UnsupportedError, "memory=")


def test_check_says_how_many_tokens_a_memory_holds():
    """The last tokens that fit and the first that do not, in a layer that is allocated."""
    config, method = tiny_llama().config, "turbo:bits=2,memory=152000"
    found, plain = (check(config, text, device_type="cpu", at_tokens=256) for text in (method, "turbo:bits=2"))
    assert found.held is not None and found.held[0] < found.held[1]
    assert found.kv_bytes == plain.kv_bytes and found.effective_bits == plain.effective_bits
    assert found.longest(2**40) == found.held[1] < plain.longest(2**40)
    layer = BudgetLayer(patch(tiny_llama(), method)._qattn.specs[0])
    keys = torch.zeros(1, 2, found.held[1], 16)
    layer.reserve(found.held[1])
    layer.update(keys, keys)
    assert layer.capacity == found.held[1]
    refused(lambda: layer.reserve(found.held[1] + 1), CapacityError, "Raise memory=")
