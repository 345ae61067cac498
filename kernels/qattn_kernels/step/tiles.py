"""What a layer launches on a GPU with which tiles, and other tiles to try there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qattn_kernels.chip import Chip, chip_of
from qattn_kernels.launch import tuned
from qattn_kernels.launch.constants import PrefillSizes, power_of_two
from qattn_kernels.launch.launches import Launch
from qattn_kernels.launch.plan import forget_plans
from qattn_kernels.launch.tiles import prefill_bytes, prefill_tiles
from qattn_kernels.launch.tuned import Prefill
from qattn_kernels.layer.support import unsupported
from qattn_kernels.layout import WIDEST_HEAD
from qattn_kernels.step.warm import LayerShape, launches

# Warps and queries of a program; a program of 128 queries has twice the warps
PROGRAMS = ((4, 64), (8, 64), (4, 128))
SLOTS, STAGES = (32, 64, 128), (1, 2, 3, 4)


class Use(NamedTuple):
    """How a layer launches a kernel.

    Attributes:
        kernel: its name.
        warps: warps of a program.
        tiles: of a prefill's attention, the `Prefill` configuration in use; else None.
        shared: of a prefill's attention, an upper bound of its shared memory in bytes; else None.
    """

    kernel: str
    warps: int
    tiles: Prefill | None = None
    shared: int | None = None


def uses(shape: LayerShape) -> list[Use] | str:
    """Return the kernels that a layer launches in `generate` on its device, or why there are none.

    In a context `chip.as_chip(chip)` the device is that GPU, which need not be here."""
    reason = unsupported(shape.spec, shape.kv_heads, shape.dim, shape.v_dim or shape.dim)
    if reason is not None:
        return reason
    chip = chip_of(shape.device)
    return [*dict.fromkeys(_use(one, shape.dtype.itemsize, chip) for one in launches(shape))]


def _use(one: Launch, width: int, chip: Chip) -> Use:
    name, warps, size = one.kernel.fn.__name__, one.options.get("num_warps", 4), one.options.get("C")
    if not isinstance(size, PrefillSizes):
        return Use(name, warps)
    tiles = Prefill(size.BN, size.TAIL, warps * 64 // max(64, size.BM), size.STAGES, size.BM)
    return Use(name, warps, tiles, prefill_bytes(size, width, chip))


def kind_of(shape: LayerShape) -> tuple[str, int]:
    """Return the key of a layer's prefill configurations in `Tuned.prefill`."""
    size = next(one.options["C"] for one in launches(shape) if one.kernel.fn.__name__ == "attend")
    half = "float" if shape.dtype == torch.float32 else "half"
    kind = "int8" if size.V_INT8 else "fp8" if size.V_FP8 else half
    return kind, power_of_two(max(shape.dim, shape.v_dim or shape.dim, 64))


def candidates(shape: LayerShape) -> Iterator[Prefill]:
    """Yield prefill configurations that fit the GPU: the one in use, then others that launch something else."""
    chip, key = chip_of(shape.device), kind_of(shape)
    tried = (
        Prefill(bn, min(bn, 64), warps, stages, queries)
        for bn, stages, (warps, queries) in product(SLOTS, STAGES, PROGRAMS)
        if (stages > 1 or key[1] > WIDEST_HEAD) and 64 * warps >= key[1]  # else registers do not hold the sums
    )
    seen: set[Use] = set()
    for one in (*prefill_tiles(chip, *key), *tried):
        with trying(chip, key, one):
            made = map(partial(_use, width=shape.dtype.itemsize, chip=chip), launches(shape))
            use = next(use for use in made if use.tiles is not None)
        if use not in seen and (use.shared or 0) <= chip.block:
            seen.add(use)
            yield one


@contextmanager
def trying(chip: Chip, key: tuple[str, int], config: Prefill) -> Iterator[None]:
    """Context in which prefills of a `kind_of` take the tiles of `config` if they fit."""
    forget_plans()
    with tuned.trying(tuned.tuned_for(chip)._replace(prefill={key: (config,)})):
        yield
    forget_plans()


def keep(gpu: Chip, chosen: dict[tuple[str, int], Prefill], measured: Any) -> Path:
    """Write configurations to the file of a GPU in the user's folder, in front of those that it has.

    Returns:
        The file. Later processes read it; this one does from now on.
    """
    table = tuned.tuned_for(gpu)
    own = table.prefill if table.gpu == gpu.name else {}
    prefill = {**own, **{key: (config,) for key, config in chosen.items()}}
    file = tuned.folder() / tuned.file_name(gpu.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        tuned.as_text(tuned.Tuned(gpu.name, gpu.capability, table.decode, prefill), measured), encoding="utf-8"
    )
    tuned.forget()
    forget_plans()
    return file
