"""A cache that keeps to a number of bytes: which bits its blocks have, from `memory` of a recipe.

Blocks begin with 8 bits. Where room runs out, as many of a row's first blocks as it takes get half the bits of one
side, values before keys: K8V8, K8V4, K4V4, K4V2, K2V2, as far as the recipe's bits go. When all have them, the next
stage follows. So a layer has blocks of two kinds at most, and loses less than one whose blocks had the fewer bits from
the start.
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
MOST = 2**32  # blocks of a row that anyone asks for
SPARE = 32  # blocks get fewer bits for one part in so many more than come, so that it happens seldom


@dataclass(frozen=True)
class BudgetLayerSpec(LayerSpec):
    """Spec of a packed layer that keeps to a number of bytes, of formats whose blocks begin with 8 bits.

    Attributes:
        memory: bytes of the layer's tensors, of all rows together, at most; of all layers before `shared`.
        k_bits, v_bits: fewest bits that blocks may have in the end.
    """

    memory: int = 0
    k_bits: int = 4
    v_bits: int = 4


def shared(specs: list[Spec]) -> list[Spec]:
    """The specs of a model's layers with the memory of all divided among those that are packed. One share more is left
    for the copy of a layer that changes its bits.

    Raises:
        ValueError: a layer that is packed without a budget.
    """
    packed = [spec for spec in specs if isinstance(spec, LayerSpec)]
    bounded = [spec for spec in packed if isinstance(spec, BudgetLayerSpec)]
    if bounded and (len(bounded) < len(packed) or any(spec.latent for spec in bounded)):
        raise ValueError(
            "memory holds for packed layers that are all turbo's, without latent attention, windows or states of "
            "their own: leave memory out, or the settings of single layers"
        )
    return [
        replace(spec, memory=spec.memory // (len(bounded) + 1)) if isinstance(spec, BudgetLayerSpec) else spec
        for spec in specs
    ]


def stages(spec: BudgetLayerSpec) -> list[tuple[int, int]]:
    """Bits of keys and values from first to last: one side at a time is halved, values first."""
    k = v = BEGIN
    found = [(k, v)]
    while (k, v) != (spec.k_bits, spec.v_bits):
        k, v = (k, v // 2) if v > spec.v_bits and (v >= k or k == spec.k_bits) else (k // 2, v)
        found.append((k, v))
    return found


def at_stage(spec: BudgetLayerSpec, stage: int, aged: int = 0) -> BudgetLayerSpec:
    """The spec with the bits of a stage, the first `aged` blocks of each row with those of the next one."""
    steps = stages(spec)
    bits, following = steps[stage], steps[min(stage + 1, len(steps) - 1)]

    def changed(fmt: Format, own: int, then: int) -> Any:
        core = may_age(fmt).with_bits(own, None if own == then else aged)
        return replace(fmt, inner=core) if fmt.smoothed else core  # type: ignore[call-arg]

    return replace(spec, k=changed(spec.k, bits[0], following[0]), v=changed(spec.v, bits[1], following[1]))


def all_stages(spec: BudgetLayerSpec) -> list[BudgetLayerSpec]:
    """The spec at each of its stages, without aged blocks: what kernels of it are compiled for."""
    return [at_stage(spec, stage) for stage in range(len(stages(spec)))]


def stage_of(spec: BudgetLayerSpec) -> int:
    """The stage that a spec is at."""
    k, v = (may_age(fmt).spans(1)[-1].bits for fmt in (spec.k, spec.v))
    return stages(spec).index((k, v))


def arranged(spec: BudgetLayerSpec, geometry: Geometry, need: int, wish: int) -> tuple[BudgetLayerSpec, int]:
    """The spec with the most bits in which `need` blocks a row fit, and the capacity: as many as fit, up to `wish`.

    Raises:
        CapacityError: they do not fit in the fewest bits.
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
        f"a row would have {need * spec.window.block} tokens, and of {geometry.batch} rows {size(spec.memory)} a layer "
        f"hold {max(0, most)} each in {spec.k_bits} bits of keys and {spec.v_bits} of values; nothing was written. "
        "Give more memory, fewer bits, or shorter rows"
    )


def unbounded(spec: LayerSpec) -> LayerSpec:
    """The spec of a layer with a budget as if all its blocks had the fewest bits, and no limit; any other as it is."""
    last = all_stages(spec)[-1] if isinstance(spec, BudgetLayerSpec) else None
    return spec if last is None else LayerSpec(**{field.name: getattr(last, field.name) for field in fields(LayerSpec)})


def held_tokens(spec: BudgetLayerSpec, geometry: Geometry) -> tuple[int, int]:
    """Tokens of each row for which the memory suffices: while all blocks have 8 bits, and when all have the fewest."""
    first, *_, last = (max(0, most_blocks(one, geometry, MOST)) for one in all_stages(spec))
    return first * spec.window.block, last * spec.window.block


def most_blocks(spec: BudgetLayerSpec, geometry: Geometry, wish: int) -> int:
    """The most blocks of a row that fit, up to `wish`; -1 if nothing does."""
    if _fits(spec, geometry, wish):
        return wish
    return _least(lambda blocks: not _fits(spec, geometry, blocks), wish) - 1


def _aged(spec: BudgetLayerSpec, stage: int, geometry: Geometry, blocks: int) -> BudgetLayerSpec | None:
    """The spec at this stage with as few aged blocks as it takes to have `blocks` a row; None if they do not fit."""
    longest = blocks - 1 if stage + 1 < len(stages(spec)) else 0  # all of them would be the next stage

    def fits(aged: int) -> bool:
        return _fits(at_stage(spec, stage, aged), geometry, blocks)

    return at_stage(spec, stage, _least(fits, longest)) if fits(longest) else None


def _fits(spec: BudgetLayerSpec, geometry: Geometry, blocks: int) -> bool:
    return places(Layout(replace(geometry, blocks=blocks), spec))[1] <= spec.memory


def _least(holds: Callable[[int], bool], known: int) -> int:
    """The least number from 0 on for which `holds`, as it does for `known` and for all from that least one on."""
    low, high = 0, known
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
