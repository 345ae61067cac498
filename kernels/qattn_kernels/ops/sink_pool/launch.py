"""Launches of the sink pool: before the append, and of a long call before that into the panel."""

from __future__ import annotations

from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import codes
from qattn_kernels.launch.panel import Panel, tensors
from qattn_kernels.ops.sink_pool.kernel import pool_kernel, restore_kernel


def compete(call: Call) -> None:
    """The pool competes with each block that the call closes; nothing without a pool."""
    if call.table is None:
        return
    launch(
        pool_kernel, (call.sizes.H, call.batch),
        *call.new, *call.spans, call.row_state, call.state["dropped"], call.k, call.v, call.k_sinks, call.v_sinks,
        call.table, call.chosen, call.moved, call.blocks, call.picked[1], jit_of(call.spec.k).open,
        jit_of(call.spec.v).open, call.sizes, **codes(call.sizes),
    )  # fmt: skip


def restore(call: Call, panel: Panel, past: int) -> None:
    """Sinks of at most `past` blocks to their slots of the panel; before the pool competes."""
    if call.table is not None and past > 0:
        launch(
            restore_kernel, (call.sizes.H, call.batch),
            call.table, call.k_sinks, call.v_sinks, tensors(panel), panel.pos.shape[1], call.sizes, **codes(call.sizes),
        )  # fmt: skip
