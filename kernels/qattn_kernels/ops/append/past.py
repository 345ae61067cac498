"""Unpack the packed blocks of earlier calls for a prefill, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Slot
from qattn_kernels.jit.rows import locate, slot_bits
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.layout import BlockState, RowState
from qattn_kernels.ops.append.long_call import UnpackedSide, store_unpacked


@triton.jit(do_not_specialize=["NB"])
def unpack_past_kernel(LAYER, UNPACKED, NB, K_LOCATE: tl.constexpr, V_LOCATE: tl.constexpr, K_GET: tl.constexpr,
                       V_GET: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Unpack one packed block into the unpacked keys and values. One program per (block of the past, head, row)."""
    index, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    unpacked, blocks = UnpackedTensors(*UNPACKED), BlockState(*LAYER.blocks)
    slots = unpacked.slots
    if index < tl.load(RowState(*LAYER.rows).closed + b):
        t, bh = tl.arange(0, C.BLOCK), b * C.H + h
        slot = index * C.BLOCK + t
        there = t < tl.load(blocks.block_len + b * NB + index)
        keep = there & (slot_bits(blocks.dropped + bh.to(tl.int64) * NB * (C.BLOCK // 8), slot) == 0)
        tl.store(unpacked.bias + bh.to(tl.int64) * slots + slot, tl.where(keep, 0.0, float("-inf")))
        if h == 0:
            tl.store(unpacked.pos + b.to(tl.int64) * slots + slot, tl.load(blocks.block_pos + b * NB + index) + t)
        k_place, _, _ = locate(LAYER.k, b, h, K_LOCATE, K_SIDE, C)
        v_place, _, _ = locate(LAYER.v, b, h, V_LOCATE, V_SIDE, C)
        k, k_scale = K_GET(LAYER.k, Slot(b, h, index, NB, k_place), K_SIDE, C)
        v, v_scale = V_GET(LAYER.v, Slot(b, h, index, NB, v_place), V_SIDE, C)
        mean = None
        if K_SIDE.SMOOTH:
            d = tl.arange(0, K_SIDE.DP)
            mean = tl.load(LAYER.k_mean + bh * K_SIDE.D + d, mask=d < K_SIDE.D, other=0.0)
        store_unpacked(UnpackedSide(unpacked.k, unpacked.k_scale, slots), k, k_scale, mean, bh, slot, K_SIDE, C)
        store_unpacked(UnpackedSide(unpacked.v, unpacked.v_scale, slots), v, v_scale, None, bh, slot, V_SIDE, C)
