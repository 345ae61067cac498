"""Tokens taken back: by kernels where the layer is computed by them, and by the reference."""

from __future__ import annotations

from functools import partial

import torch

from qattn_kernels.launch.plan import planned
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import RowState, State
from qattn_kernels.ops.crop import reference


def crop(state: State, spec: LayerSpec, drop: int, arena: torch.Tensor, layout: str) -> None:
    """`reference.crop`; sinks of a pool are taken back by it alone.

    Args:
        state, spec, drop: as there. arena: uint8, of which `state` is views. layout: `Layout.encode()` of its sizes.
    """
    if spec.impl != "triton" or spec.sink_pool.num:
        return reference.crop(state, spec, drop)
    key = "crop", layout, state["dropped"].shape, drop, arena.device
    planned(key, (arena,), partial(_launch, state, spec, drop))
    for side, fmt in (("k", spec.k), ("v", spec.v)):
        fmt.cropped(side_of(state, side), spec.window, state["length"], state["closed"])
    return None


def _launch(state: State, spec: LayerSpec, drop: int) -> tuple[()]:
    from qattn_kernels.launch.constants import power_of_two  # which loads Triton when it is first used
    from qattn_kernels.launch.launches import launch
    from qattn_kernels.ops.crop.kernel import BLOCKS, clear_kernel, crop_kernel

    window, dropped = spec.window, state["dropped"]
    batch, heads, blocks, n_bytes = dropped.shape
    rows = RowState(*(state[name] for name in RowState._fields))
    with torch.cuda.device_of(dropped):
        launch(
            crop_kernel, (batch,),
            rows, state["origin"], state["ring_from"], state["block_pos"], state["block_len"], drop, blocks,
            BLOCK=window.block, SPAN=window.span, RESIDUAL=window.residual, HORIZON=window.horizon,
            WINDOWED=spec.k.windowed or spec.v.windowed, num_warps=4,
        )  # fmt: skip
        launch(
            clear_kernel, (-(-blocks // BLOCKS.value), heads, batch),
            rows, state["block_len"], dropped, heads, blocks, BLOCK=window.block, BYTES=power_of_two(n_bytes),
            num_warps=4,
        )  # fmt: skip
    return ()
