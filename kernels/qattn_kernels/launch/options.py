"""Launch options that several operations share."""

from __future__ import annotations

from qattn_kernels.launch.constants import Sizes


def codes(size: Sizes, most: int = 64 * 128) -> dict[str, int]:
    """Options of kernels that make codes (see `ops/append/kernel.py`) and hold a whole block in registers: of more
    than `most` numbers in those of twice as many threads."""
    return {"enable_fp_fusion": False, "num_warps": 8 if most < size.BLOCK * size.DP else 4}
