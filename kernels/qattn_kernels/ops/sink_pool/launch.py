"""Launches of the sink pool: before the append, and of a long call before that into the unpacked keys and values."""

from __future__ import annotations

from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import codes, dependent
from qattn_kernels.launch.unpacked_kv import UnpackedKV, tensors
from qattn_kernels.ops.sink_pool.kernel import pool_kernel, restore_kernel


def compete(call: Call) -> None:
    """The pool competes with each block that the call closes; nothing without a pool."""
    if call.table is None:
        return
    launch(
        pool_kernel, (call.sizes.H, call.batch),
        *call.new, *call.spans, call.row_state, call.state["dropped"], call.k, call.v, call.k_sinks, call.v_sinks,
        call.table, call.chosen, call.moved, call.blocks, call.picked[1], jit_of(call.spec.k).quantize_tokens,
        jit_of(call.spec.v).quantize_tokens, call.sizes, **codes(call.sizes), **dependent(call.sizes.DEPENDENT),
    )  # fmt: skip


def restore(call: Call, unpacked: UnpackedKV, past: int) -> None:
    """Sinks of at most `past` blocks to their slots of the unpacked keys and values; before the pool competes."""
    if call.table is not None and past > 0:
        launch(
            restore_kernel, (call.sizes.H, call.batch),
            call.table, call.k_sinks, call.v_sinks, tensors(unpacked), unpacked.pos.shape[1], call.sizes,
            **codes(call.sizes),
        )  # fmt: skip
