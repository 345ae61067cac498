"""Pieces that kernels share, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers import DEVICE

from qattn_kernels.jit.math import divide

pytestmark = pytest.mark.gpu


@triton.jit
def _divide_rows(X, DIVISOR, OUT, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = r[:, None] * COLUMNS + c[None, :]
    tl.store(OUT + at, divide(tl.load(X + at), tl.load(DIVISOR + r)[:, None]))


def test_divide_is_ieee_division():
    """Divisors over all normal magnitudes; quotients up to 448, and the ties that decide a code's rounding."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = 256, 512
    mantissa = 1 + torch.rand(rows, 1, generator=generator)
    divisor = mantissa * torch.exp2(torch.linspace(-126, 117, rows)[:, None].round())
    x = (torch.rand(rows, columns, generator=generator) - 0.5) * 896 * divisor
    ties = torch.arange(columns // 4) + 0.5
    x[:, : columns // 4] = ties * divisor
    x[:, columns // 4 : columns // 2] = torch.nextafter(ties * divisor, torch.zeros(()))
    x, divisor = x.to(DEVICE), divisor.to(DEVICE)
    out = torch.empty_like(x)
    _divide_rows[(1,)](x, divisor, out, rows, columns, num_warps=8, enable_fp_fusion=False)
    torch.testing.assert_close(out, x / divisor, rtol=0, atol=0)
