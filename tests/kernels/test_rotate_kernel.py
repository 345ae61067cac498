"""The rotation of head dims against its definition, and its kernel against it bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, normal

from qattn_kernels.ops.rotate import launch
from qattn_kernels.ops.rotate.reference import rotate, rotate_back, signs

pytestmark = pytest.mark.gpu
DIMS = [16, 64, 80, 96, 128, 256]
# Triton's interpreter cuts off what bf16 has no room for
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_keeps_products(dim: int):
    """And mixes channels of a block alone: the largest power of two that divides the head dim."""
    matrix, size = rotate(torch.eye(dim)), dim & -dim
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    assert ((matrix.abs() - size**-0.5).abs() < 1e-6).sum() == dim * size and (matrix != 0).sum() == dim * size
    x, y = normal(2, 3, dim)
    torch.testing.assert_close(rotate(x) @ rotate(y).T, x @ y.T, atol=1e-4, rtol=0)
    torch.testing.assert_close(rotate_back(rotate(x)), x, atol=1e-5, rtol=0)


def test_it_is_signs_and_then_sylvesters_matrix():
    hadamard = torch.ones(1, 1)
    while len(hadamard) < 8:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    x = normal(5, 8)
    torch.testing.assert_close(rotate(x), (x * signs(8, x.device)) @ hadamard / 8**0.5)


def test_rotation_of_a_token_does_not_depend_on_its_call():
    x = normal(1, 8, 513, 128)
    assert torch.equal(rotate(x)[:, 3:4, 400:401], rotate(x[:, 3:4, 400:401]))
    assert torch.equal(rotate(x.bfloat16())[:, :, :7], rotate(x.bfloat16()[:, :, :7]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotate(x)[:, :, :7], rotate(x[:, :, :7])) and rotate(x).dtype == x.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_the_kernel_has_the_references_bits(dim: int, dtype: torch.dtype):
    """In the order of memory in which a model makes its keys, of sizes that fill no tile, and one token alone."""
    for tokens in (1, 37):
        x, y = ((normal(2, tokens, h, dim) * 10).to(DEVICE, dtype).transpose(1, 2) for h in (6, 3))
        for turned, back in ((rotate, False), (rotate_back, True)):
            for got, given in zip(launch.rotate([x, y], back=back), (x, y), strict=True):
                assert torch.equal(got, turned(given))
                assert got.stride() == given.stride()
        by = normal(2, 3, dim).exp2().to(DEVICE)
        for factors in ([by[0], by[1]], [by[0], None]):
            want = map(rotate, (x, y), factors)
            assert all(map(torch.equal, launch.rotate([x, y], factors), want))
