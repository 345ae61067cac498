"""The device tensors of one layer, by name."""

from __future__ import annotations

from functools import lru_cache

import torch

from qattn_kernels.formats.traits import compensates, has_static_scales
from qattn_kernels.layer.skip_counts import skip_count_tensors
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry, State, TensorSpec


def row_tensors(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """Return the bookkeeping tensors that every layer has, with any format.

    For each row:
    - `length`: real tokens. `closed`: closed blocks. `open_start`: row position of the first open token.
    - `origin`: row position where the current run of full blocks began: 0, or where a crop beyond the horizon last cut
      into packed blocks.
    - `longest`: largest length since that crop.
    - `ring_from`: row position before which the ring holds no token, after such a crop or a change of the ring's size.
    - `overflow`: tokens that did not fit the capacity and were dropped, if the caller could not check before.
    - `block_pos`, `block_len`: first row position and tokens of each closed block.
    - `dropped`: one bit per token slot, set where its score is masked. `nonfinite`: count of non-finite tokens.
    - with sparse V, the counters of `SkipCounts`.

    For all rows: `columns_seen`: columns of all calls, padding included. `padded`: columns up to the end of the last
    padding.
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
    """Return the tensors of a layer's sink table, `[B, Hkv, entries]` each (`ops.sink_pool.table`).

    Free entries are zeros. The sinks' keys and values are `k.sink` and `v.sink`.
    - `sink.pos`: row position. `sink.slot`: slot of the token in the arenas.
    - `sink.born`: number of the close, from 1, at which the token entered the pool.
    - `sink.evicted`: number of the close at which it moved to the window of evicted sinks.
    - `sink.written`: number of the close at which it left the window, to be read from its block.
    - `sink.norm`: magnitude of the key, which decides between sinks; fp64, so that summation order does not matter.
    """
    shape = (geo.batch, geo.heads, spec.sink_pool.entries(spec.window))
    tensors = {f"sink.{name}": TensorSpec(shape, torch.int32) for name in ("pos", "slot", "born", "evicted", "written")}
    return {**tensors, "sink.norm": TensorSpec(shape, torch.float64)}


def layer_tensors(geo: Geometry, spec: LayerSpec) -> dict[str, TensorSpec]:
    """Return all state tensors of a layer by name, in the order in which operators take them.

    `k.equalizer` `[2, Hkv, D]`: factors of key channels before rotation, then factors of query channels."""
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
    """Return whether a layer has state tensors that hold constants of its model, which calls never write.

    These are shares of errors (`formats.traits.compensates`), `k.equalizer`, and static scales."""
    return spec.compute.equalize or compensates(spec.k) or any(map(has_static_scales, (spec.k, spec.v)))


def side_of(state: State, side: str) -> State:
    """Return the tensors of the format of one `side`, `k` or `v`, without prefix: `k.codes` becomes `codes`.

    The tensors are shared with the state, so writing to them writes to the state."""
    return {short: state[name] for name, short in _names_of(side, tuple(state))}


@lru_cache(maxsize=1024)
def _names_of(side: str, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the names of one side, each with and without prefix."""
    prefix = f"{side}."
    return [(name, name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
