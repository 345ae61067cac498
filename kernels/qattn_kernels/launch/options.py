"""Launch options that several operations share."""

from __future__ import annotations

from functools import lru_cache

import torch

from qattn_kernels.launch.constants import Sizes

HOPPER = 9, 0  # compute capability of the first GPUs with programmatic dependent launch


def codes(size: Sizes, most: int = 64 * 128) -> dict[str, int]:
    """Options of kernels that make codes (see `ops/append/kernel.py`) and hold a whole block in registers: of more
    than `most` numbers in those of twice as many threads."""
    return {"enable_fp_fusion": False, "num_warps": 8 if most < size.BLOCK * size.DP else 4}


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on `device` can start before the one ahead of them has ended."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= HOPPER


def dependent(early: bool) -> dict[str, bool]:
    """Options of kernels that start early, and wait by themselves (`jit.dependent.await_previous_kernel`)."""
    return {"launch_pdl": True} if early else {}
