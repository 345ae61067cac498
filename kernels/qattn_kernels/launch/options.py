"""Launch options that several operations share."""

from __future__ import annotations

from qattn_kernels.launch.constants import Sizes
from qattn_kernels.layout import WIDEST_HEAD


def warps_of(channels: int, warps: int) -> int:
    """Return `warps`, or twice as many for heads wider than 256 channels."""
    return warps if channels <= WIDEST_HEAD else 2 * warps


def dependent(size: Sizes) -> dict[str, bool]:
    """Return launch options of kernels that wait by themselves (`jit.dependent.await_previous_kernel`)."""
    return {"launch_pdl": True} if size.DEPENDENT else {}


def codes(size: Sizes, most: int = 64 * 128) -> dict[str, int]:
    """Return launch options of kernels that quantize (see `ops/append/kernel.py`) and hold a whole block in registers.

    4 warps up to `most` numbers per block, 8 above, and 16 for latents wider than 256 channels."""
    dim = max(size.K.DP, size.V.DP)
    warps = 16 if dim > WIDEST_HEAD else 8 if most < size.BLOCK * dim else 4
    return {"enable_fp_fusion": False, "num_warps": warps}
