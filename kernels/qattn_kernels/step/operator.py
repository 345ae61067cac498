"""The registered operator: append, close and attend in one call, the only writer of a layer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

import torch

from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute, LayerSpec, decode_spec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry, State
from qattn_kernels.ops.rotate.reference import rotate, rotate_back
from qattn_kernels.step.reference import reference_step

Rotate = Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]


class CapacityError(ValueError):
    """A call would not fit the capacity of its cache; nothing was written."""


@lru_cache(maxsize=1024)
def state_names(spec: LayerSpec) -> tuple[str, ...]:
    """Names of the state tensors in the order in which the operator takes them."""
    heads = max(spec.k.least_heads, spec.v.least_heads)
    return tuple(layer_tensors(Geometry(1, heads, 8, 8, 1, torch.float32), spec))


def _check_capacity(state: State, spec: LayerSpec, span: torch.Tensor) -> None:
    """Refuse what would overflow. Elsewhere than on a CPU a step must not wait for lengths: there the caller keeps an
    upper bound, as `QAttnLayer` does, and what went past it all the same is not written but counted (`overflow`).
    """
    if span.device.type != "cpu":
        return
    block = spec.window.block
    need = int((state["closed"] * block + state["length"] - state["open_start"] + span[:, 1]).max())
    have = state["block_len"].shape[1] * block
    if need > have:
        raise CapacityError(
            f"the cache holds {have} tokens a row and this call needs {need}; nothing was written. Make it with a "
            "larger max_cache_len; a cache without one grows, but not inside a compiled call"
        )


def _rotated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, compute: Compute, rotate: Rotate
) -> Iterator[torch.Tensor]:
    """Query, key and value as the layer multiplies and stores them; `rotate` is called once, with all that rotate."""
    sides = ((query, compute.rotate), (key, compute.rotate), (value, compute.rotate_v))
    rotated = iter(rotate([x for x, rotation in sides if rotation == "hadamard"]))
    return (x if rotation == "none" else next(rotated) for x, rotation in sides)


@torch.library.custom_op("qattn::attend", mutates_args={"state"})
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: torch.Tensor,
    state: list[torch.Tensor],
    spec: str,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    past: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new keys and values, close full blocks, and attend.

    Args:
        query: `[B, Hq, T, D]`. key, value: `[B, Hkv, T, D]`.
        span: int32 `[B or 1, 2]`, first real column of the new tokens and how many real ones follow.
        state: the layer's tensors in the order of `state_names`, changed in place.
        spec: `LayerSpec.encode()`.
        scale, softcap, window, sinks: see `Scores`.
        past: an upper bound of the blocks that any row has closed before the call; the capacity always is one.

    Returns:
        `[B, Hq, T, Dv]` in the query's dtype, zeros for padding; fp32 log-sum-exp `[B, Hq, T]`.

    Raises:
        CapacityError: on a CPU, if the tokens do not fit; nothing was written.
    """
    layer = decode_spec(spec)
    named = dict(zip(state_names(layer), state, strict=True))
    scores = Scores(scale, softcap, window, sinks)
    _check_capacity(named, layer, span)
    if layer.impl == "triton":  # which is loaded when it is first used
        from qattn_kernels.ops.rotate import launch
        from qattn_kernels.step.kernels import fused_step

        with torch.cuda.device_of(query):  # Triton launches on the current device, whatever the tensors' own is
            query, key, value = _rotated(query, key, value, layer.compute, launch.rotate)
            out, lse = fused_step(query, key, value, span, named, layer, scores, past)
            return out if layer.compute.rotate_v == "none" else launch.rotate([out], back=True)[0], lse
    with torch.autocast(query.device.type, enabled=False):  # sums of integer products are exact in fp32 only
        query, key, value = _rotated(query, key, value, layer.compute, partial(map, rotate))
        out, lse = reference_step(query, key, value, span, named, layer, scores)
        return out if layer.compute.rotate_v == "none" else rotate_back(out), lse


@attend.register_fake
def _(query, key, value, span, state, spec, scale, softcap, window, sinks, past):
    shape = (*query.shape[:3], value.shape[3])
    return query.new_empty(shape), query.new_empty(query.shape[:3], dtype=torch.float32)
