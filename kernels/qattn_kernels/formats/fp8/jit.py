"""FP8 with one scale per token in kernels. `formats/fp8/reference.py` is the specification.

Products are in fp16, as for INT8 tokens, because fp16 represents FP8 and INT8 codes exactly."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import JIT as INT8
from qattn_kernels.formats.int8.jit import addresses, numbers
from qattn_kernels.formats.int8.jit import get as get_codes
from qattn_kernels.jit.math import SMALLEST_NORMAL, divide, round_even
from qattn_kernels.jit.rows import block_of

LARGEST = tl.constexpr(448.0)  # largest E4M3 number
LEAST_NORMAL = tl.constexpr(0.015625)  # 2^-6: below it, E4M3 numbers are 2^-9 apart


@triton.jit
def rounded(x):
    """Round to the nearest E4M3 number, ties to even: drops 20 of 23 mantissa bits."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = round_even(x * 512.0) * (1.0 / 512.0)
    return tl.where(tl.abs(x) < LEAST_NORMAL, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def to_bytes(x):
    """Return the bytes of E4M3 numbers `x`, fp32, on any GPU.

    The exponent bias of fp32 is 120 larger: `x * 2^-120` has the exponent bits of E4M3, also below `LEAST_NORMAL`."""
    bits = (x * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
    return ((bits & 127) | ((bits >> 4) & 128)).to(tl.uint8)


@triton.jit
def signed_divide(x, divisor):
    """Divide like `divide`, but keep the sign of a zero, which E4M3 has too."""
    return tl.where(x == 0.0, x, divide(x, divisor))


@triton.jit
def quantize_tokens(x):
    """Quantize tokens to FP8. Needs `enable_fp_fusion=False`, like every kernel that quantizes."""
    top = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(top, tl.full(top.shape, LARGEST, tl.float32))
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    return rounded(signed_divide(x, divisor[:, None])), scale


@triton.jit
def block_form(code, scale, keep):
    """Return dequantized tokens, which an unquantized prefill reads."""
    return code * scale[:, None], scale


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    inside = tl.arange(0, SIDE.DP) < SIDE.D
    tl.store(
        addresses(S.codes, at, tokens.t, SIDE, C), to_bytes(tokens.code), mask=tokens.write[:, None] & inside[None, :]
    )
    tl.store(S.scale + at * C.BLOCK + tokens.t, tokens.scale, mask=tokens.write)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    code, scale = get_codes(S, slot, SIDE, C)
    return numbers(code, C).to(tl.float32) * scale[:, None], scale


# `fuses` as INT8 does: 512 is a power of two, so the product before the addition in `rounded` is exact
JIT = INT8._replace(quantize_tokens=quantize_tokens, block_form=block_form, put=put, get=get)
