"""Launch the sink pool for long calls: restore sinks to the unpacked keys and values, then compete before the
append."""

from __future__ import annotations

import torch

from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import codes, warps_of
from qattn_kernels.launch.unpacked_kv import UnpackedKV, tensors
from qattn_kernels.ops.sink_pool.kernel import pool_kernel, restore_kernel, sizes_kernel


def compete(call: Call) -> None:
    """Let the pool compete with each block that a long call closes.

    Runs before the append; does nothing without a pool. Short calls compete inside the append."""
    if call.sinks.table is None:
        return
    size, open_blocks = call.sizes, call.sinks.chosen.shape[2]
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    shape = (call.batch, size.H, open_blocks, size.BLOCK)
    key_sizes = torch.empty(shape, dtype=torch.float64, device=call.key.device)
    launch(
        sizes_kernel, (open_blocks, size.H, call.batch),
        call.source, *call.spans, call.layer, key_sizes, call.blocks, k.quantize_tokens, size,
        **codes(size),
    )  # fmt: skip
    launch(
        pool_kernel, (size.H, call.batch),
        call.source, *call.spans, call.layer, key_sizes, call.blocks, open_blocks, k.quantize_tokens, v.quantize_tokens,
        size,
        **codes(size) | {"num_warps": warps_of(size.K.DP, 4)},  # no program holds a whole block in registers
    )  # fmt: skip


def restore(call: Call, unpacked: UnpackedKV, past: int) -> None:
    """Write the sinks of at most `past` blocks to their slots of the unpacked keys and values. Runs before
    `compete`."""
    if call.sinks.table is not None and past > 0:
        launch(
            restore_kernel, (call.sizes.H, call.batch),
            call.sinks, tensors(unpacked), call.sizes,
            **codes(call.sizes),
        )  # fmt: skip
