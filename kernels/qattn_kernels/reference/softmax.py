"""SAS, the sparsity-based softmax approximation of TurboAttention (section 4, Algorithm 3)."""

from __future__ import annotations

import torch

POLY = (0.9996, -0.9922, 0.4626, -0.1025)  # coefficients of 1, f, f^2, f^3: e^-f on [0, 1)


def sas_exp(x: torch.Tensor, threshold: float = -6.0) -> torch.Tensor:
    """Approximate `exp(x)` for `x` in `[threshold, 0]`, and return 0 below `threshold`; fp32 in and out.

    `LUT[i] * POLY(f)` with `-x = i + f`, `i` whole, `f` in [0, 1), `LUT[i] = exp(-i)`. For -2.5, `i = 2` and `f = 0.5`.
    The result is within 1.04e-3 relative of the exponential. `threshold = -inf` cuts nothing."""
    inside = (x >= threshold) & ~x.isneginf()
    x = torch.where(inside, -x, 0.0)
    whole = x.floor()
    f = x - whole
    c0, c1, c2, c3 = POLY
    return torch.where(inside, torch.exp(-whole) * (c0 + f * (c1 + f * (c2 + f * c3))), 0.0)
