"""How the programs of an append share the work: the same bits and outputs whoever does it."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, case_id, make_layer
from kernel_cases import FORMATS, INT8, KIVI, NONE, TURBO
from test_fused_kernels import closes_again, differing, feed, inputs

from qattn_kernels.ops.append import launch as append
from qattn_kernels.ops.decode import launch as decode
from qattn_kernels.step import kernels
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@pytest.mark.slow
@pytest.mark.parametrize("case", [TURBO, KIVI, FORMATS[6]], ids=case_id)
def test_a_block_is_written_by_one_program_or_two(case: Case, monkeypatch):
    """The bits are equal, including masked tokens in a block that closes."""
    qkv, layers = inputs(2, 129), []
    qkv[1][1, 0, 127, 1] = qkv[2][0, 1, 63, 0] = math.nan
    for most in (0, 1000):
        monkeypatch.setattr(append, "FEW_PROGRAMS", most)
        layers.append(make_layer(case, 192))
        feed(fused_step, layers[-1], qkv, [60, 64, 100, 126, 128, 129])
    assert differing(*layers) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [TURBO, INT8, KIVI, FORMATS[6], ("sage2", {})], ids=case_id)
def test_a_block_of_a_long_call_is_written_by_one_program_or_two(case: Case, monkeypatch):
    """Bits and outputs are equal, with old tokens, masked tokens and tokens past a row's end."""
    qkv, layers, outs = inputs(2, 150), [], []
    qkv[1][1, 0, 100, 1] = qkv[2][0, 1, 63, 0] = math.nan
    chosen = append._long_codes
    for parts in (1, 2):
        monkeypatch.setattr(append, "_long_codes", lambda call, parts=parts: (parts, chosen(call)[1]))
        layers.append(make_layer(case, 192))
        outs.append(feed(fused_step, layers[-1], qkv, [20, 90, 150], first=3))
    assert differing(*layers) == []
    assert all(map(torch.equal, *outs))


@pytest.mark.slow
@pytest.mark.parametrize("case", [("turbo", {}), ("sinkq", {"group_size": 32, "residual_length": 0})], ids=case_id)
def test_queries_are_rotated_by_programs_of_their_own_or_by_the_last_ones(case: Case, monkeypatch):
    """The same outputs, also where the last program has a block to close."""
    qkv, outs = inputs(2, 68), []
    for most in (0, 1000):
        monkeypatch.setattr(append, "AT_ONCE", most)
        layer = make_layer((case[0], {**case[1], "rotate_k": "hadamard"}), 96)
        outs.append(feed(fused_step, layer, qkv, [60, 61, 64, 68]))
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("case", [("kivi", {"residual_length": 64}), ("sinkq", {"group_size": 32})], ids=case_id)
def test_a_block_closes_by_a_token_of_the_next_one(case: Case):
    """With a residual window the program of a block that closes has no new token."""
    qkv = inputs(1, 140)
    one, other = make_layer(case, 192), make_layer(case, 192)
    window = one.spec.window
    closes = window.residual + window.span
    assert window.residual >= window.block  # so that the token that closes the first block lies in a later one
    cuts = [closes - 2, closes - 1, closes, closes + 1]
    feed(reference_step, one, qkv, cuts)
    feed(fused_step, other, qkv, cuts)
    assert int(other.state["closed"][0]) > 0
    assert differing(one, other) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [INT8, ("fp8", {}), NONE], ids=case_id)
def test_a_decode_writes_what_an_append_would(case: Case, monkeypatch):
    """Bits and outputs are equal: in rows without a token, of a token that is not finite, and after a crop."""
    qkv, launched, layers, outs = inputs(2, 70), [], [], []
    qkv[1][1, 0, 65, 1] = qkv[2][0, 1, 63, 0] = math.nan
    monkeypatch.setattr(kernels, "append", lambda call: (launched.append(call.tokens), append.append(call)))
    for _ in range(2):
        layers.append(make_layer(case, 192))
        outs.append(feed(fused_step, layers[-1], qkv, [1, 2, 3, 62, 63, 64, 65, 66, 70], first=2))
        layers.append(make_layer(case, 192))
        closes_again(fused_step, layers[-1], qkv, inputs(2, 70, seed=1), [2, 3])
        monkeypatch.setattr(decode, "takes_token", lambda *_: False)
    assert differing(layers[0], layers[2]) == differing(layers[1], layers[3]) == []
    assert launched.count(1) == 9  # the second time alone
    for one, other in zip(*outs, strict=True):
        # the same operations, but a compiler may fuse other multiplications and additions: some units in the last place
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, equal_nan=True)
