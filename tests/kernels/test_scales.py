"""Scales in 16 bits without a sign: fp16's precision over a wider range, the same in kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers import DEVICE

from qattn_kernels.formats import scale_bits
from qattn_kernels.formats.scales import LEAST, MOST, from_bits, to_bits

ALL = torch.arange(65536, dtype=torch.int32).to(torch.int16)
FULL = ALL[1024:]  # bits whose exponent is not 0: these are what `to_bits` makes, but for a scale of 0


def numbers() -> torch.Tensor:
    """Return scales of all sizes: every number of the format, the midpoints between neighbours, and the neighbours of
    midpoints."""
    exact = from_bits(FULL)
    between = (exact[1:] + exact[:-1]) / 2
    around = [torch.nextafter(between, torch.tensor(far)) for far in (0.0, torch.inf)]
    few = torch.tensor([0.0, 1e-45, 1e-38, 1e-12, LEAST * 0.999, LEAST, MOST, MOST * 1.001, 1e30, torch.inf])
    return torch.cat([exact, between, *around, few])


def test_examples_of_the_bits():
    bits = torch.tensor([0, 0x0400, 0x7C00, 0x8000 - 65536, 0x8200 - 65536, -1], dtype=torch.int16)
    want = torch.tensor([0.0, 2.0**-30, 1.0, 2.0, 3.0, MOST])
    assert torch.equal(from_bits(bits), want) and torch.equal(to_bits(want), bits)


def test_every_number_comes_back_and_larger_bits_are_larger():
    held = from_bits(FULL)
    assert torch.equal(to_bits(held), FULL)
    assert (held[1:] > held[:-1]).all() and held[0] == LEAST and held[-1] == MOST


def test_all_bits_are_finite_numbers_of_at_least_zero():
    """As a file may hold them: below exponent 1 they are tiny, and 0 alone is 0."""
    held = from_bits(ALL)
    assert held.isfinite().all() and (held >= 0).all() and (held[:1024] < LEAST).all()


def test_scales_are_what_fp16_makes_of_them_where_it_has_full_precision():
    """From its smallest normal number, 2^-14, to where it rounds to infinity: the same roundings, ties included."""
    x = numbers()
    x = x[(x >= 2**-14) & (x < 65520)]
    assert len(x) > 100_000 and torch.equal(from_bits(to_bits(x)), x.half().float())


def test_small_scales_are_zero_and_large_ones_the_largest():
    x = torch.tensor([0.0, 1e-45, 1e-38, LEAST * 0.999, MOST * 1.001, 1e30, torch.inf])
    assert from_bits(to_bits(x)).tolist() == [0.0] * 4 + [MOST] * 3


@triton.jit
def both_ways(X, BITS, BACK, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    bits = scale_bits.to_bits(tl.load(X + i))
    tl.store(BITS + i, bits)
    tl.store(BACK + i, scale_bits.from_bits(bits))


@pytest.mark.gpu
def test_kernels_make_the_same_bits_and_the_same_numbers():
    x = numbers()
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096)).to(DEVICE)
    bits, back = torch.empty_like(x, dtype=torch.int16), torch.empty_like(x)
    both_ways[(len(x) // 4096,)](x, bits, back, 4096)
    assert torch.equal(bits, to_bits(x)) and torch.equal(back, from_bits(bits))
