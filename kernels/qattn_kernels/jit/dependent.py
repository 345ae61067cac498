"""Programmatic dependent launch (Hopper and later): the GPU prepares a kernel before the previous one has ended."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous_kernel(DEPENDENT: tl.constexpr):
    """Wait until the previous kernel of the stream has ended and its stores are visible.

    Every program of a kernel that is launched with `options.dependent` must call this before it reads or writes."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release_next_kernel(DEPENDENT: tl.constexpr):
    """Let the next kernel of the stream start once every program has called this or ended.

    Call it as late as possible: the next kernel's programs wait, but take up places meanwhile. Kernels that called it
    first were 26 % slower at one row of 32k tokens on an H200."""
    if DEPENDENT:
        gdc_launch_dependents()
