"""INT-FlashAttention's formats, rotation and arithmetic against their definitions and the paper's plain math."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import Case, attention_fp64, error, feed, make_layer, random_qkv, same_state
from papers import int_flash as paper

from qattn_kernels.formats import Operand
from qattn_kernels.formats.base import Block
from qattn_kernels.formats.int8_block.reference import Int8BlockFormat
from qattn_kernels.formats.packed import unpack
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute, Sparsity
from qattn_kernels.layer.state import side_of
from qattn_kernels.ops.rotate.reference import rotate
from qattn_kernels.reference.attention import attend
from qattn_kernels.reference.queries import short_queries
from qattn_kernels.reference.tiles import FOREVER, Tiles

TENSOR: Case = ("paper_int_flash", {"v_granularity": "tensor"})


def block_of(x: list[list[float]], index: int = 0) -> Block:
    """A block of one head and row, token by token, on its way to place `index` of the arena."""
    tokens, keep = torch.tensor(x)[None, None], torch.ones(1, 1, len(x), dtype=torch.bool)
    return Block(Operand(tokens, None), keep, torch.tensor([index]), torch.tensor([True]))


def test_values_by_hand():
    """A block of two tokens: 127 is the largest, so the scale is 1; 2.5 is a tie, to even."""
    state = {"codes": torch.zeros(1, 1, 1, 3, 2, dtype=torch.int8), "scale": torch.zeros(1, 1, 1)}
    fmt, block = Int8BlockFormat(), block_of([[127.0, 2.5, 0.4], [-3.5, 0.0, -126.6]])
    fmt.write(state, block)
    assert state["codes"][0, 0, 0].tolist() == [[127, -4], [2, 0], [0, -127]]  # [D, tokens]
    assert state["scale"].tolist() == [[[1.0]]]
    assert torch.equal(fmt.read(state, 1).dequantize()[:, :, 0], fmt.block_form(block.tokens, state).dequantize())


def test_one_scale_serves_all_later_values_clamped_and_counted():
    state = {
        "codes": torch.zeros(1, 1, 2, 1, 2, dtype=torch.int8),
        "scale": torch.zeros(1, 1),
        "clamped": torch.zeros(1, 1, dtype=torch.int64),
    }
    fmt = Int8BlockFormat(granularity="tensor")
    fmt.write(state, block_of([[127.0], [1.0]]))
    fmt.write(state, block_of([[127.4], [-300.0]], index=1))
    assert state["codes"][0, 0, :, 0].tolist() == [[127, 1], [127, -127]]
    assert state["scale"].tolist() == [[1.0]] and state["clamped"].tolist() == [[1]]


def test_weights_and_their_sum_by_hand():
    """Scores 0, -log 2 and -log 400 give weights 127, 64 (63.5 is a tie) and 0 (0.3), whose sum is 191."""
    scores = torch.tensor([400.0, 200.0, 1.0]).log()
    codes = torch.tensor([10, 20, 30], dtype=torch.int8).view(1, 1, 1, 3, 1)
    k, v = Operand(torch.ones_like(codes), scores.view(1, 1, 1, 3)), Operand(codes, torch.full((1, 1, 1, 3), 0.5))
    pos = torch.zeros(1, 1, 3, dtype=torch.int32)
    tiles = Tiles(k, v, pos, pos, pos + FOREVER, torch.ones(1, 1, 1, 3, dtype=torch.bool))
    compute = Compute(pv_levels=127, round_sum=True)
    query = short_queries(torch.ones(1, 1, 1, 1), 1.0, compute)
    got = attend(query, pos[:, 0, :1], tiles, Scores(1.0), compute, Sparsity(), prefill=False)
    assert got.out.item() == pytest.approx(0.5 * (127 * 10 + 64 * 20) / 191, rel=1e-6)
    assert got.lse.item() == pytest.approx(scores[0].item() + math.log(191 / 127), rel=1e-6)


PAPER = {
    "full": ({}, paper.FULL),
    "half": ({"mode": "half"}, dataclasses.replace(paper.FORMATS["half"], cast=lambda x: x)),
    "4-bit Q and K": ({"bits": 4}, paper.FORMATS["full, 4-bit Q and K"]),
}


@pytest.mark.parametrize(("settings", "form"), PAPER.values(), ids=PAPER)
def test_one_block_has_the_papers_numbers(settings: dict, form: paper.Format):
    """Over one block the tensor is the block and the running maximum the final one: its Algorithm 1 in plain math."""
    q, k, v = random_qkv(1, 64, dim=64)
    last = feed(make_layer(("int_flash", settings)), q, k, v, [64])[0, :, -1]
    for head in range(4):
        inputs = paper.rounded_inputs(q[0, head, -1:], k[0, head // 2], v[0, head // 2], form)
        torch.testing.assert_close(last[head], paper.attend(*inputs, 64**-0.5, form)[0], atol=1e-5, rtol=1e-5)


def test_half_errs_less_than_full_and_four_bits_more():
    q, k, v = random_qkv(1, 600, dim=64)
    exact = attention_fp64(q, k, v)
    half, full, four = (
        error(feed(make_layer(("int_flash", s), 1024), q, k, v, [500, *range(520, 601, 20)]), exact)
        for s in ({"mode": "half"}, {}, {"bits": 4})
    )
    assert half < full < four < 0.3


@pytest.mark.parametrize("cuts", [[128], [100, *range(101, 129)]], ids=["prefill", "steps"])
def test_values_of_zeros_take_their_weight(cuts: list[int]):
    """A block of them has no scale, and a row sum without it would make the others too large."""
    q, k, v = random_qkv(1, 128, dim=64)
    v[:, :, :64] = 0
    out = feed(make_layer(("int_flash", {})), q, k, v, cuts)[:, :, -1]
    assert error(out, attention_fp64(q, k, v)[:, :, -1]) < 0.1


def test_rotation_spreads_a_channel_that_stands_out():
    """At 4 bits one large channel takes the levels of all others."""
    q, k, v = random_qkv(1, 400, dim=64)
    k[..., 7] *= 12
    exact = attention_fp64(q, k, v)
    none, turned = (
        error(feed(make_layer(("int_flash", {"bits": 4, "rotate": r})), q, k, v, [300, *range(320, 401, 20)]), exact)
        for r in ("none", "hadamard")
    )
    assert turned < none / 2


def test_stored_keys_are_the_rotated_ones():
    q, k, v = random_qkv(1, 64)
    layer = make_layer(("int_flash", {"rotate": "hadamard"}))
    feed(layer, q, k, v, [64])
    held = layer.spec.k.read(side_of(layer.state, "k"), 1).dequantize()[:, :, 0]
    assert (held - rotate(k)).abs().max() < rotate(k).abs().max() / 127


def test_four_bit_keys_lie_two_a_byte():
    _, k, v = random_qkv(1, 64)
    layer = make_layer(("int_flash", {"mode": "half", "bits": 4}))
    feed(layer, torch.zeros(1, 4, 64, 32), k, v, [64])
    state = side_of(layer.state, "k")
    assert state["codes"].dtype == torch.uint8 and state["codes"].shape[3:] == (32, 32)
    scale = k.abs().amax(-1, keepdim=True) / 7
    codes = unpack(state["codes"][:, :, 0], 4).int() - 8
    assert torch.equal(codes, torch.round(k / scale).int()) and codes.abs().max() == 7
    assert torch.equal(side_of(layer.state, "v")["x"][:, :, 0], v)


@pytest.mark.parametrize("cuts", [[30, 100, 230], [63, 64, *range(65, 231)], [*range(20, 230, 20), 230]])
def test_one_scale_depends_on_tokens_alone(cuts: list[int]):
    q, k, v = random_qkv(2, 230)
    v[:, :, 100:] *= 3
    whole, cut = make_layer(TENSOR), make_layer(TENSOR)
    feed(whole, q, k, v, [230])
    feed(cut, q, k, v, cuts)
    assert same_state(whole, cut) == []
    torch.testing.assert_close(whole.state["v.scale"], v[:, :, :64].abs().amax((2, 3)) / 127)
    assert (whole.state["v.clamped"] > 0).all()


def test_one_scale_goes_with_its_block():
    """It stays while codes say it, however short their block; a crop of all of them unsets it."""
    q, k, v = random_qkv(1, 230)
    far, near = make_layer(TENSOR), make_layer(TENSOR)
    feed(far, q, k, v, [230])
    scale = far.state["v.scale"].clone()
    far.crop(-200)
    assert torch.equal(far.state["v.scale"], scale)
    feed(near, q, k, v, [100])
    near.crop(-50)
    assert not near.state["v.scale"].any()


@pytest.mark.parametrize("granularity", ["block", "tensor"])
def test_a_prefill_sees_values_as_they_will_be_read(granularity: str):
    q, k, v = random_qkv(1, 128)
    v[:, :, 64:] *= 2
    layer = make_layer(("paper_int_flash", {"compute": "model", "v_granularity": granularity}))
    out = feed(layer, q, k, v, [128])[:, :, -1]
    sides = (("k", layer.spec.k), ("v", layer.spec.v))
    held = [fmt.read(side_of(layer.state, side), 2).dequantize().flatten(2, 3) for side, fmt in sides]
    torch.testing.assert_close(out, attention_fp64(q[:, :, -1:], *held)[:, :, 0].float(), atol=1e-5, rtol=0)
