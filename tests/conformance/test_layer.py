"""What every method's layer must do with the same keys and values, however they arrive."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import Case, attention_fp64, feed, make_layer, random_qkv, same_state

from qattn_hf import CapacityError, UnsupportedError
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.state import layer_tensors, side_of
from qattn_kernels.layout import Geometry
from qattn_kernels.ops.rotate.reference import rotate

CUTS = {
    "two calls": [150, 300],
    "chunks of 61": [*range(61, 300, 61), 300],
    "chunks of 20": list(range(20, 301, 20)),
    "token by token": list(range(1, 301)),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_state_depends_on_tokens_alone(case: Case, cuts: list[int]):
    qkv = random_qkv(2, 300)
    whole, cut = make_layer(case), make_layer(case)
    feed(whole, *qkv, [300])
    feed(cut, *qkv, cuts)
    assert same_state(whole, cut) == []
    assert whole.state["closed"].min() >= 2


def test_padded_row_equals_row_alone_bit_for_bit(row_case: Case):
    q, k, v = random_qkv(2, 200)
    padded, alone = make_layer(row_case), make_layer(row_case)
    both = feed(padded, q, k, v, [140, 160, *range(161, 201)], first=13)
    one = feed(alone, *(x[:1, :, 13:] for x in (q, k, v)), [127, 147, *range(148, 188)])
    assert same_state(padded, alone, rows=(0, 0)) == []
    assert padded.state["length"].tolist() == [187, 200]
    assert torch.equal(both[0, :, :13], torch.zeros_like(both[0, :, :13]))
    torch.testing.assert_close(both[:1, :, 13:], one, atol=1e-5, rtol=0)  # fp32 sums of other batch shapes


def test_short_calls_are_single_steps(case: Case):
    qkv = random_qkv(1, 230)
    steps, drafts = make_layer(case), make_layer(case)
    one = feed(steps, *qkv, [110, *range(111, 231)])
    many = feed(drafts, *qkv, [110, 142, 150, 181, 190, 222, 230])
    torch.testing.assert_close(many, one, atol=1e-5, rtol=0)  # fp32 sums of other shapes; a code is 1e-2


def test_packed_attention_is_near_full_precision_and_not_equal(case: Case):
    q, k, v = random_qkv(2, 260)
    out = feed(make_layer(case), q, k, v, [200, *range(201, 261)])
    exact = attention_fp64(q, k, v)
    error = ((out - exact).norm() / exact.norm()).item()
    assert error < 0.5  # 2-bit values of random keys cost about 0.35
    assert error > 1e-4 or case[0] == "none"


def test_lse_merges_parts(case: Case):
    """The log-sum-exp belongs to the scores: the last token's weights over all keys sum to one."""
    q, k, v = random_qkv(1, 130)
    layer = make_layer((case[0], {**case[1], "compute": "model", "softmax": "exact"}))
    feed(layer, q, k, v, [129])
    handle, _ = layer.update(k[:, :, 129:], v[:, :, 129:])
    _, lse = layer.attend(q[:, :, 129:], handle, torch.tensor([[0, 1]], dtype=torch.int32), Scores(32**-0.5))
    scores = (q[:, :, 129:] @ k.repeat_interleave(2, 1).mT) * 32**-0.5
    assert (lse - scores.logsumexp(-1)).abs().max() < (1e-4 if case[0] == "none" else 0.3)


@pytest.mark.parametrize(("start", "taken"), [(100, 64), (127, 1), (127, 30), (128, 1), (128, 64), (190, 30)])
def test_crop_within_horizon_leaves_no_trace(case: Case, start: int, taken: int):
    q, k, v = random_qkv(2, 330)
    _, wrong_k, wrong_v = random_qkv(2, taken, seed=9)
    cropped, never = make_layer(case), make_layer(case)
    feed(cropped, q, k, v, [start])
    feed(never, q, k, v, [start])
    feed(cropped, q[:, :, :taken], wrong_k, wrong_v, [*range(16, taken, 16), taken])
    cropped.crop(-taken)
    rest = [x[:, :, start:] for x in (q, k, v)]
    cuts = [*range(20, 330 - start, 20), 330 - start]
    assert torch.equal(feed(cropped, *rest, cuts), feed(never, *rest, cuts))
    assert same_state(cropped, never) == []


def test_crop_of_the_first_block_leaves_no_trace(row_case: Case):
    """Scales, means and widths of heads that its tokens fixed go with it, and what comes next fixes them anew."""
    cropped, never = make_layer(row_case), make_layer(row_case)
    start = cropped.spec.window.span + cropped.spec.window.residual - 10
    q, k, v = random_qkv(2, start + 150)
    for layer in (cropped, never):
        feed(layer, q, k, v, [start])
    feed(cropped, *(3 * x for x in random_qkv(2, 40, seed=9)), [8, 40])
    assert not cropped.spec.k.windowed or (cropped.state["closed"] > 0).all()
    cropped.crop(-40)
    rings = ("ring", "ring_scale", "clamped")  # slots past the row's end are undefined, and events are counted
    fixed = [n for n, spec in cropped.tensor_specs().items() if n[:2] in ("k.", "v.") and spec.block_dim is None]
    fixed = [n for n in fixed if n[2:] not in rings]
    assert [n for n in fixed if not torch.equal(cropped.state[n], never.state[n])] == []
    rest = [x[:, :, start:] for x in (q, k, v)]
    assert torch.equal(feed(cropped, *rest, [100, 120, 150]), feed(never, *rest, [100, 120, 150]))
    assert [n for n in same_state(cropped, never) if n[2:] != "clamped"] == []


def test_crop_beyond_horizon_keeps_codes_and_opens_a_block(case: Case):
    q, k, v = random_qkv(2, 300)
    layer = make_layer(case)
    feed(layer, q, k, v, [300])
    before = {name: t.clone() for name, t in layer.state.items()}
    layer.crop(torch.tensor(-200))
    windowed = layer.spec.k.windowed or layer.spec.v.windowed
    block = layer.spec.window.block
    assert layer.state["length"].tolist() == [100, 100] and int(layer.get_seq_length()) == 100
    for name in ("k.codes4", "v.codes4", "k.codes", "v.codes"):
        if name in before:
            assert torch.equal(layer.state[name][:, :, 0], before[name][:, :, 0])
    feed(layer, *(x[:, :, 100:290] for x in (q, k, v)), [190])
    if windowed:
        full, tail = divmod(100, block)
        assert layer.state["block_len"][0, : full + 2].tolist() == [*[block] * full, tail, block]
        assert layer.state["block_pos"][0, full + 1] == 100
    else:  # final formats reopen exactly, however far back
        never = make_layer(case)
        feed(never, q, k, v, [100, 290])
        rest = [x[:, :, 290:] for x in (q, k, v)]
        assert torch.equal(feed(layer, *rest, list(range(1, 11))), feed(never, *rest, list(range(1, 11))))


def test_crops_one_after_another_reach_no_farther_than_the_ring(case: Case):
    """Rejected tokens occupy the ring slots of older ones, so a second crop must not reopen blocks from these slots."""
    q, k, v = random_qkv(2, 144)
    layer = make_layer(case)
    feed(layer, q, k, v, [140])
    feed(layer, *(30 * x for x in random_qkv(2, 60, seed=9)), [30, 60])
    layer.crop(-60)
    feed(layer, *(x[:, :, 140:141] for x in (q, k, v)), [1])
    layer.crop(-60)
    out = feed(layer, *(x[:, :, 81:] for x in (q, k, v)), [1, 63])
    exact = attention_fp64(q, k, v)[:, :, 81:]
    assert (
        out - exact
    ).norm() < 0.6 * exact.norm()  # 2-bit values cost about 0.35, a rejected one is 30 times as large


def test_crop_all_equals_fresh(case: Case):
    qkv = random_qkv(2, 150)
    used, fresh = make_layer(case), make_layer(case)
    feed(used, *random_qkv(2, 90, seed=3), [90])
    used.crop(-90)
    assert torch.equal(feed(used, *qkv, [100, 150]), feed(fresh, *qkv, [100, 150]))
    assert same_state(used, fresh) == []


def test_crop_into_padding_is_refused_and_loses_nothing(case: Case):
    q, k, v = random_qkv(2, 120)
    layer = make_layer(case)
    feed(layer, q, k, v, [100, 120], first=10)
    before = copy.deepcopy(layer)
    with pytest.raises(UnsupportedError, match="padding"):
        layer.crop(-111)
    assert same_state(layer, before) == []
    layer.crop(-40)
    assert layer.state["length"].tolist() == [70, 80]


def test_raised_horizon_takes_back_more(case: Case):
    q, k, v = random_qkv(1, 400)
    layer, never = make_layer(case), make_layer(case)
    feed(layer, q, k, v, [50])
    layer.raise_horizon(150)
    feed(never, q, k, v, [100])
    feed(layer, *(x[:, :, 50:250] for x in (q, k, v)), [50, 120, 200])
    layer.crop(-150)
    rest = [x[:, :, 100:] for x in (q, k, v)]
    assert torch.equal(feed(layer, *rest, [40, 70, 300]), feed(never, *rest, [40, 70, 300]))


def test_every_tensor_of_rows_says_so(row_case: Case):
    """What has a dimension of rows moves along it in `reorder_cache` and its like, what has one of blocks grows."""
    spec = make_layer(row_case).spec
    small = layer_tensors(Geometry(3, 2, 32, 32, 5, torch.float32), spec)
    changed = [
        layer_tensors(Geometry(*sizes, 32, 32, blocks, torch.float32), spec)
        for *sizes, blocks in ((4, 2, 5), (3, 2, 6))
    ]
    for name, tensor in small.items():
        rows, blocks = (
            [i for i, pair in enumerate(zip(tensor.shape, other[name].shape, strict=True)) if len({*pair}) == 2]
            for other in changed
        )
        assert rows == [d for d in [tensor.batch_dim] if d is not None], name
        assert blocks == [d for d in [tensor.block_dim] if d is not None], name


def test_rows_move_together(row_case: Case):
    q, k, v = random_qkv(3, 150)
    k, v = (x * torch.tensor([1.0, 2.0, 4.0])[:, None, None, None] for x in (k, v))  # so do the scales that rows keep
    layer = make_layer(row_case)
    feed(layer, q, k, v, [140, 150], first=9)
    addresses = {n: t.data_ptr() for n, t in layer.state.items()}
    copied = copy.deepcopy(layer)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert {n: t.data_ptr() for n, t in layer.state.items()} == addresses
    assert [same_state(layer, copied, rows=pair) for pair in ((0, 2), (1, 0), (2, 0))] == [[], [], []]
    layer.batch_select_indices(torch.tensor([1, 0]))
    layer.batch_repeat_interleave(2)
    order = [(0, 0), (1, 0), (2, 2), (3, 2)]
    assert [same_state(layer, copied, rows=pair) for pair in order] == [[]] * 4
    more = [x[[0, 0, 2, 2]] for x in random_qkv(3, 70, seed=5)]
    out = feed(layer, *more, list(range(1, 71)))
    assert torch.equal(out[0], out[1]) and not torch.equal(out[0], out[2])
    stayed = feed(copied, *random_qkv(3, 70, seed=5), [20, 40, 60, 70])
    # fp32 sums of other batch shapes may round an INT8 weight to the next code, 1/127; a row's scale is off by 2 or 4
    torch.testing.assert_close(out[::2], stayed[::2], atol=2e-2, rtol=0)


def test_reset_equals_fresh_at_the_same_addresses(case: Case):
    qkv = random_qkv(2, 150)
    layer, fresh = make_layer(case), make_layer(case)
    feed(layer, *random_qkv(2, 170, seed=3), [170])
    addresses = [t.data_ptr() for t in layer.state.values()]
    layer.reset()
    feed(layer, *qkv, [150])
    feed(fresh, *qkv, [150])
    assert same_state(layer, fresh) == []
    assert [t.data_ptr() for t in layer.state.values()] == addresses


def test_growth_changes_nothing_but_room(case: Case):
    q, k, v = random_qkv(2, 400)
    cuts = [30, 100, 300, *range(301, 331), 400]
    grown, fixed = make_layer(case, max_cache_len=None), make_layer(case, max_cache_len=1024)
    out = feed(grown, q, k, v, cuts)
    torch.testing.assert_close(out, feed(fixed, q, k, v, cuts), atol=1e-5, rtol=0)  # sums over more empty tiles
    assert torch.equal(grown.state["closed"], fixed.state["closed"])
    assert not grown.is_compileable and fixed.is_compileable
    assert grown.capacity < 1024


def test_overflow_of_a_fixed_capacity_loses_nothing(case: Case):
    q, k, v = random_qkv(1, 200)
    layer = make_layer(case, max_cache_len=128)
    feed(layer, q, k, v, [120])
    before = copy.deepcopy(layer)
    with pytest.raises(CapacityError, match="nothing was written"):
        feed(layer, *(x[:, :, 120:] for x in (q, k, v)), [80])
    assert same_state(layer, before) == []
    feed(layer, *(x[:, :, 120:128] for x in (q, k, v)), [8])
    assert layer.state["length"].tolist() == [128]


@pytest.mark.parametrize("cuts", [[150], [100, *range(101, 151)]], ids=["prefill", "steps"])
def test_what_is_not_finite_is_masked_and_counted(case: Case, cuts: list[int]):
    q, k, v = random_qkv(1, 150)
    k, v = k.clone(), v.clone()
    k[0, 0, 40, 5], v[0, 0, 120, 7] = torch.nan, torch.inf
    layer = make_layer(case)
    out = feed(layer, q, k, v, cuts)
    assert out.isfinite().all()
    assert layer.state["nonfinite"].tolist() == [[2, 0]]
    hidden = attention_fp64(q, k[:, 1:].repeat_interleave(2, 1), v[:, 1:].repeat_interleave(2, 1))[:, 2:]
    assert ((out[:, 2:] - hidden).norm() / hidden.norm()) < 0.5  # the other head is not disturbed
    visible = [t for t in range(150) if t not in (40, 120)]
    seen = attention_fp64(q[:, :2, -1:], k[:, :1, visible], v[:, :1, visible])
    assert ((out[:, :2, -1:] - seen).norm() / seen.norm()) < 0.6


@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf])
def test_a_query_that_is_not_finite_spoils_its_own_output_alone(case: Case, wrong: float):
    """In long and short calls. What shares a scale or a mean with it is as if it were zeros."""
    q, k, v = random_qkv(2, 112)
    broken, zeros = q.clone(), q.clone()
    for token in (40, 103, 108):
        broken[1, 2, token, 3], zeros[1, 2, token] = wrong, 0
    one, other = make_layer(case), make_layer(case)
    got, want = (feed(layer, x, k, v, [100, 107, *range(108, 113)]) for layer, x in ((one, broken), (other, zeros)))
    want[1, 2, [40, 103, 108]] = torch.nan
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    asked = {"mass.ring", "sink.norm"}  # where sinks are what queries look at: this one looked at nothing
    assert set(same_state(one, other)) <= asked


def test_what_is_masked_bends_no_scale(case: Case):
    """Masked tokens have keys and values far from zero.

    If they counted for scales, other tokens would have several times the error. The error must equal that without a
    mask.
    """
    q, k, v = random_qkv(1, 192)
    k, v = k + 10.0, v + 10.0
    layer, whole = make_layer(case), make_layer(case)
    feed(whole, q, k, v, [192])
    holes = torch.arange(192) % 20 == 7
    masked = k.clone()
    masked[:, :, holes, 5] = torch.nan
    feed(layer, q, masked, v, [192])
    blocks, block = int(layer.state["closed"][0]), layer.spec.window.block
    for side, x, rotated in (("k", k, layer.spec.compute.rotate), ("v", v, layer.spec.compute.rotate_v)):
        by = layer.state["k.equalizer"][0] if side == "k" and layer.spec.compute.equalize else None
        x = rotate(x, by) if rotated == "hadamard" else x
        kept = (~holes)[: blocks * block]
        errors = []
        for one in (layer, whole):
            held = getattr(one.spec, side).read(side_of(one.state, side), blocks).dequantize().flatten(2, 3)
            errors.append((held - x[:, :, : blocks * block])[:, :, kept].norm())
        assert errors[0] <= 1.1 * errors[1]
