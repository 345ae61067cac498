"""Crop a layer with the kernels, or with the reference if the layer does not use kernels."""

from __future__ import annotations

from functools import partial

import torch

from qattn_kernels.formats.base import FixedBy
from qattn_kernels.launch.plan import planned
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import RowState, State
from qattn_kernels.ops.crop import reference


def crop(state: State, spec: LayerSpec, drop: int, arena: torch.Tensor, layout: str) -> None:
    """`reference.crop`, without waiting for the device.

    Args:
        state, spec, drop: as in the reference.
        arena: uint8, the memory that the tensors of `state` are views of.
        layout: `Layout.encode()` of the arena.
    """
    if spec.impl != "triton":
        return reference.crop(state, spec, drop)
    key = "crop", layout, state["dropped"].shape, drop, arena.device
    planned(key, (arena,), partial(_launch, state, spec, drop))
    return None


def _launch(state: State, spec: LayerSpec, drop: int) -> tuple[()]:
    from qattn_kernels.launch.constants import power_of_two  # imported here because it loads Triton
    from qattn_kernels.launch.launches import launch
    from qattn_kernels.ops.crop.kernel import BLOCKS, CropSizes, clear_kernel, crop_kernel

    window, dropped = spec.window, state["dropped"]
    batch, heads, blocks, n_bytes = dropped.shape
    rows = RowState(*(state[name] for name in RowState._fields))
    by = {f"{side}.{name}": x for side, fmt in (("k", spec.k), ("v", spec.v)) for name, x in fmt.fixed.items()}
    fixed, by_tokens = tuple(state[name] for name in by), tuple(x == FixedBy.TOKENS for x in by.values())
    windowed = spec.k.windowed or spec.v.windowed
    size = CropSizes(window.block, window.span, window.residual, window.horizon, windowed)
    with torch.cuda.device_of(dropped):
        launch(
            crop_kernel, (batch,),
            rows, state["origin"], state["ring_from"], state["block_pos"], state["block_len"], fixed or None,
            drop, blocks, tuple(x.numel() // batch for x in fixed), by_tokens, size, num_warps=4,
        )  # fmt: skip
        launch(
            clear_kernel, (-(-blocks // BLOCKS.value), heads, batch),
            rows, state["block_len"], dropped, heads, blocks, BLOCK=window.block, BYTES=power_of_two(n_bytes),
            num_warps=4,
        )  # fmt: skip
        if spec.sink_pool.num:
            _launch_sinks(state, spec, rows)
    return ()


def _launch_sinks(state: State, spec: LayerSpec, rows: RowState) -> None:
    from qattn_kernels.formats.contract import sink_tensors
    from qattn_kernels.formats.side import Side
    from qattn_kernels.launch.call import Table
    from qattn_kernels.launch.constants import power_of_two
    from qattn_kernels.launch.launches import launch
    from qattn_kernels.ops.crop.sinks import PoolSizes, sinks_kernel

    table, dropped = Table(*(state[f"sink.{name}"] for name in Table._fields)), state["dropped"]
    batch, heads, blocks, _ = dropped.shape
    dim = state["k.sink"].numel() // table.pos.numel()  # values have the same dim in layers that kernels compute
    k, v = (Side(values, dim, power_of_two(dim), INTEGER=False) for values in (False, True))  # nothing else is read
    size = PoolSizes(k, v, spec.window.block, table.pos.shape[-1])
    launch(
        sinks_kernel, (heads, batch),
        rows, table, sink_tensors(state, "k"), sink_tensors(state, "v"), dropped, blocks, size, num_warps=4,
    )  # fmt: skip
