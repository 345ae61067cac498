"""Facts about the kernels of this GPU for people: on which GPU their tiles were measured, and who launches them."""

from __future__ import annotations

from qattn_kernels.chip import chip_here
from qattn_kernels.launch.driver import driver
from qattn_kernels.launch.tuned import tuned_for


def measured_on() -> str:
    """Return the name of the GPU whose launch configurations are used: the GPU in use, or another one."""
    return tuned_for(chip_here()).gpu


def borrowed() -> str | None:
    """Return why the launch configurations of another GPU are used, or None."""
    name, other = chip_here().name, measured_on()
    return None if name == other else f"no launch configurations were measured on {name}: the file of {other} is used"


def launcher() -> str:
    """Return who launches repeated calls: `driver`, or `triton` if CUDA's driver cannot report kernel parameters."""
    return "triton" if driver() is None else "driver"
