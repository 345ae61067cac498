"""The device tensors of one layer, by name."""

from __future__ import annotations

import torch

from qattn_kernels.layer.skip_counts import skip_count_tensors
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry, State, TensorSpec


def row_tensors(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """Bookkeeping that every layer has.

    `length` real tokens; `closed` blocks; `open_start` row position of the first open token; `origin` row position
    where the present run of full blocks began (moved by far crops); `longest` length since then, for the horizon;
    `ring_from` oldest row position that the ring is known to hold, if it is not too far back anyway;
    `overflow` tokens that did not fit the capacity and were not written, which only a call can meet whose caller does
    not ask the device first; `seen` columns, padding included; `padded` columns up to the end of the last padding;
    `block_pos`, `block_len` first row position and tokens of each closed block;
    `dropped` one bit a token slot whose score is masked; `nonfinite` how many there were; with sparse V a `SkipCounts`.
    """
    i32, i64, u8 = torch.int32, torch.int64, torch.uint8
    names = ("length", "closed", "open_start", "origin", "longest", "ring_from", "overflow")
    tensors = {name: TensorSpec((geo.batch,), i32) for name in names}
    tensors["seen"] = tensors["padded"] = TensorSpec((), i64, batch_dim=None)
    tensors["block_pos"] = tensors["block_len"] = TensorSpec((geo.batch, geo.blocks), i32, block_dim=1)
    tensors["dropped"] = TensorSpec((geo.batch, geo.heads, geo.blocks, spec.window.block // 8), u8, block_dim=2)
    tensors["nonfinite"] = TensorSpec((geo.batch, geo.heads), i64)
    return tensors | (skip_count_tensors(geo) if spec.sparsity.tau > 0 else {})


def sink_table(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """Of a layer with a sink pool: see `ops.sink_pool.table`. The tokens themselves are `sink` of each side.

    `sink.pos` row position; `sink.slot` among those of the arenas; `sink.born`, `sink.evicted`, `sink.written` how many
    blocks were closed when that happened; `sink.norm` the magnitude of the key by which sinks compete, fp64 so that no
    order of summing decides. A free place holds zeros.
    """
    shape = (geo.batch, geo.heads, spec.sink_pool.entries(spec.window))
    tensors = {f"sink.{name}": TensorSpec(shape, torch.int32) for name in ("pos", "slot", "born", "evicted", "written")}
    return {**tensors, "sink.norm": TensorSpec(shape, torch.float64)}


def layer_tensors(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """All state tensors of a layer by name, in the order in which operators take them."""
    tensors = row_tensors(geo, spec)
    for side, fmt, dim in (("k", spec.k, geo.k_dim), ("v", spec.v, geo.v_dim)):
        found = fmt.tensors(geo, spec.window, dim)
        if fmt.windowed:
            found |= fmt.ring_tensors(geo, spec.window.ring, dim)
            if spec.sink_pool.num:
                sinks = fmt.ring_tensors(geo, spec.sink_pool.entries(spec.window), dim)
                found |= {name.replace("ring", "sink"): tensor for name, tensor in sinks.items()}
        tensors |= {f"{side}.{name}": tensor for name, tensor in found.items()}
    if spec.sink_pool.num:
        tensors |= sink_table(geo, spec)
        if spec.sink_pool.select == "attention":
            given = (geo.batch, geo.heads, spec.window.ring, spec.window.span + spec.window.residual)
            tensors["mass.ring"] = TensorSpec(given, torch.float32)  # see `ops.sink_pool.mass`
    return dict(sorted(tensors.items()))


def side_of(state: State, side: str) -> State:
    """The tensors of one format: `k.codes` becomes `codes`. The tensors are the same objects, not copies."""
    return {name.removeprefix(f"{side}."): t for name, t in state.items() if name.startswith(f"{side}.")}
