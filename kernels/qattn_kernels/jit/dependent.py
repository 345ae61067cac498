"""Programmatic dependent launch (Hopper and later): a kernel starts while the one ahead of it still runs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous_kernel(DEPENDENT: tl.constexpr):
    """First of all in every kernel that is launched with `options.dependent`.

    Nothing is read or written before the kernel ahead has ended, so the kernels of a stream still follow one another,
    but none waits for its launch. The next one may take its places once all programs of this one are past the wait: no
    more than two are there at once. Were it earlier, those behind a decode would crowd it on some multiprocessors.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
