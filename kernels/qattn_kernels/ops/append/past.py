"""Packed blocks of before a long call, unpacked for its prefill, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.rows import slot_bits
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.layout import BlockState, RowState
from qattn_kernels.ops.append.long_call import UnpackedSide, store_unpacked


@triton.jit(do_not_specialize=["NB"])
def unpack_past_kernel(STATE, BLOCKS, K, V, K_MEAN, UNPACKED, NB, slots, K_LOCATE: tl.constexpr,
                V_LOCATE: tl.constexpr, K_GET: tl.constexpr, V_GET: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Program (block of the past, head, row): packed blocks into the unpacked keys and values."""
    index, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unpacked, blocks = UnpackedTensors(*UNPACKED), BlockState(*BLOCKS)
    if index < tl.load(RowState(*STATE).closed + b):
        t, bh = tl.arange(0, C.BLOCK), b * C.H + h
        slot = index * C.BLOCK + t
        there = t < tl.load(blocks.block_len + b * NB + index)
        keep = there & (slot_bits(blocks.dropped + bh.to(tl.int64) * NB * (C.BLOCK // 8), slot) == 0)
        tl.store(unpacked.bias + bh.to(tl.int64) * slots + slot, tl.where(keep, 0.0, float("-inf")))
        if h == 0:
            tl.store(unpacked.pos + b.to(tl.int64) * slots + slot, tl.load(blocks.block_pos + b * NB + index) + t)
        k_place, _, _ = K_LOCATE(K, b, h, C.K_LOW, C)
        v_place, _, _ = V_LOCATE(V, b, h, C.V_LOW, C)
        k, k_scale = K_GET(K, b, h, index, NB, k_place, False, C)
        V_C: tl.constexpr = C.V
        v, v_scale = V_GET(V, b, h, index, NB, v_place, True, V_C)
        mean = None
        if C.SMOOTH_K:
            d = tl.arange(0, C.DP)
            mean = tl.load(K_MEAN + bh * C.D + d, mask=d < C.D, other=0.0)
        store_unpacked(UnpackedSide(unpacked.k, unpacked.k_scale, slots), k, k_scale, mean, bh, slot, False, C)
        store_unpacked(UnpackedSide(unpacked.v, unpacked.v_scale, slots), v, v_scale, None, bh, slot, True, V_C)
