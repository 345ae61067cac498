"""Programmatic dependent launch (Hopper and later): a kernel starts while the one ahead of it still runs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous_kernel(DEPENDENT: tl.constexpr):
    """First of all in every kernel that is launched with `options.dependent`.

    The next kernel may take its places as soon as all programs of this one have theirs, and nothing is read or written
    before the kernel ahead has ended: so the kernels of a stream still follow one another, but none waits for a launch.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
