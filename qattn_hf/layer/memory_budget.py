"""Choose the bit widths of a cache's blocks under a memory limit, the recipe's `memory`.

Blocks begin with 8 bits. When memory runs out, the first blocks of each row are halved in bits on one side, values
before keys. The stages are K8V8, K8V4, K4V4, K4V2, K2V2, down to the recipe's bits. When all blocks are at a stage, the
next stage begins. A layer thus has blocks of at most two kinds, and loses less than with the fewer bits from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from qattn_hf.errors import CapacityError
from qattn_hf.messages import size
from qattn_kernels.formats import Format
from qattn_kernels.formats.traits import may_age
from qattn_kernels.layer.arena import Layout, places
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry

Spec = TypeVar("Spec")
BEGIN = 8  # bits of new blocks
MOST = 2**32  # upper bound of a row's blocks
SPARE = 32  # make room for one part in SPARE more blocks than needed, so that blocks are repacked rarely


@dataclass(frozen=True)
class BudgetLayerSpec(LayerSpec):
    """Spec of a packed layer with a memory limit. Its formats start blocks at 8 bits.

    Attributes:
        memory: limit in bytes for the layer's tensors, all rows together; before `shared`, the limit of all layers.
        k_bits, v_bits: fewest bits of a block.
    """

    memory: int = 0
    k_bits: int = 4
    v_bits: int = 4


def shared(specs: list[Spec]) -> list[Spec]:
    """Return the specs of a model's layers with the memory divided among the packed layers.

    One extra share is left for the copy of a layer that changes its bits.

    Raises:
        ValueError: a packed layer has no memory limit.
    """
    packed = [spec for spec in specs if isinstance(spec, LayerSpec)]
    bounded = [spec for spec in packed if isinstance(spec, BudgetLayerSpec)]
    if bounded and (len(bounded) < len(packed) or any(spec.latent for spec in bounded)):
        raise ValueError(
            "memory needs turbo in every packed layer, without latent attention, packed windows or hybrid layers: "
            "leave memory out, or the settings of single layers"
        )
    return [
        replace(spec, memory=spec.memory // (len(bounded) + 1)) if isinstance(spec, BudgetLayerSpec) else spec
        for spec in specs
    ]


def stages(spec: BudgetLayerSpec) -> list[tuple[int, int]]:
    """Return the bits of keys and values at each stage. Each stage halves one side, values first."""
    k = v = BEGIN
    found = [(k, v)]
    while (k, v) != (spec.k_bits, spec.v_bits):
        k, v = (k, v // 2) if v > spec.v_bits and (v >= k or k == spec.k_bits) else (k // 2, v)
        found.append((k, v))
    return found


def at_stage(spec: BudgetLayerSpec, stage: int, aged: int = 0) -> BudgetLayerSpec:
    """Return the spec at a stage (an index of `stages`), with the first `aged` blocks of each row at the next stage."""
    steps = stages(spec)
    bits, following = steps[stage], steps[min(stage + 1, len(steps) - 1)]

    def changed(fmt: Format, own: int, then: int) -> Any:
        core = may_age(fmt).with_bits(own, None if own == then else aged)
        return replace(fmt, inner=core) if fmt.smoothed else core  # type: ignore[call-arg]

    return replace(spec, k=changed(spec.k, bits[0], following[0]), v=changed(spec.v, bits[1], following[1]))


def all_stages(spec: BudgetLayerSpec) -> list[BudgetLayerSpec]:
    """Return the spec at each stage without aged blocks, to compile kernels for."""
    return [at_stage(spec, stage) for stage in range(len(stages(spec)))]


def stage_of(spec: BudgetLayerSpec) -> int:
    """Return the stage of a spec."""
    k, v = (may_age(fmt).spans(1)[-1].bits for fmt in (spec.k, spec.v))
    return stages(spec).index((k, v))


def arranged(spec: BudgetLayerSpec, geometry: Geometry, need: int, wish: int) -> tuple[BudgetLayerSpec, int]:
    """Return the spec with the most bits at which `need` blocks per row fit, and the capacity in blocks.

    Args:
        spec: the current spec; bits never grow.
        geometry: sizes of the layer; its number of blocks is ignored.
        need: blocks per row that must fit.
        wish: largest capacity to return, if it fits.

    Raises:
        CapacityError: `need` blocks do not fit at the fewest bits.
    """
    if (blocks := most_blocks(spec, geometry, wish)) >= need:
        return spec, blocks
    for room in (need + need // SPARE, need):
        for stage in range(stage_of(spec), len(stages(spec))):
            if (found := _aged(spec, stage, geometry, room)) is not None:
                return found, most_blocks(found, geometry, max(wish, room))
    last = all_stages(spec)[-1]
    most = most_blocks(last, geometry, need) * spec.window.block
    raise CapacityError(
        f"{geometry.batch} rows of {need * spec.window.block} tokens need more than {size(spec.memory)} per layer, "
        f"which holds {max(0, most)} tokens per row in {spec.k_bits} bits of keys and {spec.v_bits} of values; nothing "
        "was written. Raise memory=, lower bits=, or shorten the rows"
    )


def unbounded(spec: LayerSpec) -> LayerSpec:
    """Return the spec at the fewest bits without a memory limit. Other specs are returned unchanged."""
    last = all_stages(spec)[-1] if isinstance(spec, BudgetLayerSpec) else None
    return spec if last is None else LayerSpec(**{field.name: getattr(last, field.name) for field in fields(LayerSpec)})


def held_tokens(spec: BudgetLayerSpec, geometry: Geometry) -> tuple[int, int]:
    """Return the tokens per row that fit while all blocks have 8 bits, and when all have the fewest bits."""
    first, *_, last = (max(0, most_blocks(one, geometry, MOST)) for one in all_stages(spec))
    return first * spec.window.block, last * spec.window.block


def most_blocks(spec: BudgetLayerSpec, geometry: Geometry, wish: int) -> int:
    """Return the most blocks per row that fit, up to `wish`; -1 if nothing fits."""
    if _fits(spec, geometry, wish):
        return wish
    return _least(lambda blocks: not _fits(spec, geometry, blocks), wish) - 1


def _aged(spec: BudgetLayerSpec, stage: int, geometry: Geometry, blocks: int) -> BudgetLayerSpec | None:
    """Return the spec at this stage with as few aged blocks as `blocks` blocks per row require; None if they do not
    fit."""
    longest = blocks - 1 if stage + 1 < len(stages(spec)) else 0  # aging all blocks would be the next stage

    def fits(aged: int) -> bool:
        return _fits(at_stage(spec, stage, aged), geometry, blocks)

    return at_stage(spec, stage, _least(fits, longest)) if fits(longest) else None


def _fits(spec: BudgetLayerSpec, geometry: Geometry, blocks: int) -> bool:
    return places(Layout(replace(geometry, blocks=blocks), spec))[1] <= spec.memory


def _least(holds: Callable[[int], bool], known: int) -> int:
    """Return the least number from 0 for which `holds`. It must hold for `known`, and for all numbers above the least
    one."""
    low, high = 0, known
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
