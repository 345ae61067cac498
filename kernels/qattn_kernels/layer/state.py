"""The device tensors of one layer, by name."""

from __future__ import annotations

import torch

from qattn_kernels.formats.traits import compensates
from qattn_kernels.layer.skip_counts import skip_count_tensors
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry, State, TensorSpec


def row_tensors(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """The bookkeeping tensors that every layer has, whatever its formats.

    Of each row:
    - `length`: real tokens. `closed`: closed blocks. `open_start`: row position of the first open token.
    - `origin`: row position where the present run of full blocks began, which crops behind the horizon move; `longest`:
      the largest length since then. `ring_from`: oldest row position that the ring is known to hold, unless the ring's
      size says a later one.
    - `overflow`: tokens that did not fit the capacity and were not written, where the caller could not ask before.
    - `block_pos`, `block_len`: first row position and tokens of each closed block.
    - `dropped`: one bit a token slot, set where its score is masked. `nonfinite`: how many tokens were not finite.
    - with sparse V the counters of `SkipCounts`.

    Of all rows together: `columns_seen`: columns of all calls, padding included. `padded`: columns up to the end of the
    last padding.
    """
    i32, i64, u8 = torch.int32, torch.int64, torch.uint8
    names = ("length", "closed", "open_start", "origin", "longest", "ring_from", "overflow")
    tensors = {name: TensorSpec((geo.batch,), i32) for name in names}
    tensors["columns_seen"] = tensors["padded"] = TensorSpec((), i64, batch_dim=None)
    tensors["block_pos"] = tensors["block_len"] = TensorSpec((geo.batch, geo.blocks), i32, block_dim=1)
    tensors["dropped"] = TensorSpec((geo.batch, geo.heads, geo.blocks, spec.window.block // 8), u8, block_dim=2)
    tensors["nonfinite"] = TensorSpec((geo.batch, geo.heads), i64)
    return tensors | (skip_count_tensors(geo) if spec.sparsity.tau > 0 else {})


def sink_table(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """The table of a layer's sinks, `[B, Hkv, entries]` each (`ops.sink_pool.table`); a free place holds zeros.

    The sinks' keys and values are `k.sink` and `v.sink`.
    - `sink.pos`: row position. `sink.slot`: the slot of the arenas that the token would have.
    - `sink.born`, `sink.evicted`, `sink.written`: how many blocks were closed when the token entered the pool, when it
      left it for the window of evicted sinks, and when it left that too, to be read from its block's codes.
    - `sink.norm`: magnitude of the key, by which sinks compete; fp64, so that no order of summing decides.
    """
    shape = (geo.batch, geo.heads, spec.sink_pool.entries(spec.window))
    tensors = {f"sink.{name}": TensorSpec(shape, torch.int32) for name in ("pos", "slot", "born", "evicted", "written")}
    return {**tensors, "sink.norm": TensorSpec(shape, torch.float64)}


def layer_tensors(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """All state tensors of a layer by name, in the order in which operators take them.

    `k.equalizer`: what channels of keys are multiplied by before they are rotated, and behind it those of queries.
    """
    tensors = row_tensors(geo, spec)
    for side, fmt, dim in (("k", spec.k, geo.k_dim), ("v", spec.v, geo.v_dim)):
        found = fmt.tensors(geo, spec.window, dim)
        if fmt.windowed:
            found |= fmt.ring_tensors(geo, spec.window.ring, dim)
            if spec.sink_pool.num:
                sinks = fmt.ring_tensors(geo, spec.sink_pool.entries(spec.window), dim)
                found |= {name.replace("ring", "sink"): tensor for name, tensor in sinks.items()}
        tensors |= {f"{side}.{name}": tensor for name, tensor in found.items()}
    if spec.compute.equalize:
        tensors["k.equalizer"] = TensorSpec((2, geo.heads, geo.k_dim), torch.float32, batch_dim=None)
    if spec.sink_pool.num:
        tensors |= sink_table(geo, spec)
        if spec.sink_pool.select == "attention":
            given = (geo.batch, geo.heads, spec.window.ring, spec.window.span + spec.window.residual)
            tensors["mass.ring"] = TensorSpec(given, torch.float32)  # see `ops.sink_pool.mass`
    return dict(sorted(tensors.items()))


def needs_constants(spec: LayerSpec) -> bool:
    """Whether a layer has state tensors that no call writes, since they are its model's: shares of errors
    (`formats.traits.compensates`) or `k.equalizer`."""
    return spec.compute.equalize or compensates(spec.k)


def side_of(state: State, side: str) -> State:
    """The tensors of the format of one `side`, `k` or `v`: `k.codes` becomes `codes`. No copies: writing to them writes
    to the state."""
    return {name.removeprefix(f"{side}."): t for name, t in state.items() if name.startswith(f"{side}.")}
