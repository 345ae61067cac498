"""Facts about the kernels of a layer for people: tiles, warps, the GPU that they were measured on, the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from qattn_kernels.chip import chip_of
from qattn_kernels.launch.constants import PrefillSizes
from qattn_kernels.launch.driver import driver
from qattn_kernels.launch.launches import Launch
from qattn_kernels.launch.tuned import tuned_for
from qattn_kernels.step.warm import LayerShape, launches

WARPS = 4  # Triton's default


def kernels_of(shape: LayerShape) -> list[dict[str, Any]]:
    """Return the distinct kernels that prompts and steps of a layer launch, in order. Nothing is launched.

    Returns:
        `kernel`, its name; `warps` per program; `tile`, of the prompt's attention only: `queries`, `tokens` and
        `stages`.
    """
    found = [_facts(one) for one in launches(shape)]
    return [facts for i, facts in enumerate(found) if facts not in found[:i]]


def _facts(one: Launch) -> dict[str, Any]:
    sizes = next(_prefill_sizes(one), None)
    tile = None if sizes is None else {"queries": sizes.BM, "tokens": sizes.BN, "stages": sizes.STAGES}
    return {"kernel": one.kernel.fn.__name__, "warps": one.options.get("num_warps", WARPS), "tile": tile}


def _prefill_sizes(one: Launch) -> Iterator[PrefillSizes]:
    return (x for x in (*one.arguments, *one.options.values()) if isinstance(x, PrefillSizes))


def measured_on() -> str:
    """Return the name of the GPU whose launch configurations are used: the GPU in use, or the default."""
    return tuned_for(chip_of(_device()).name).gpu


def borrowed() -> str | None:
    """Return why the launch configurations in use are those of another GPU, or None."""
    name, other = chip_of(_device()).name, measured_on()
    return None if name == other else f"launch configurations were not measured on {name}: those of {other} are used"


def _device() -> torch.device:
    """Return the GPU in use, or the CPU, whose interpreter counts as the default GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def launcher() -> str:
    """Return who launches repeated calls: `driver`, or `triton` if CUDA's driver cannot report kernel parameters."""
    return "triton" if driver() is None else "driver"
