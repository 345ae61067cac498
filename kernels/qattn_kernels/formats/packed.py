"""Codes of 2 to 4 bits, packed in bytes: the specification of what `packing` does in kernels."""

from __future__ import annotations

import torch


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[..., block, D]` packed along the tokens: `[..., n, D]` bytes, `n = block * bits / 8`.

    Byte `t` holds tokens `t`, `t + n`, ..., the first in its lowest bits: of 64 tokens in 4 bits, code 5 of token 0 and
    code 9 of token 32 make byte 0 0x95. Tokens far apart share a byte, so that a kernel's masks and shifts yield whole
    part tiles, not interleaved ones. 3 bits lie as their lower two and, behind those, their highest.
    """
    if bits == 3:
        return torch.cat([pack(code & 3, 2), pack(code >> 2, 1)], dim=-2)
    parts = code.chunk(8 // bits, dim=-2)
    out = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        out |= part << (bits * i)
    return out


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: bytes `[..., n, D]` to codes `[..., block, D]`. In 4 bits 0x95 in byte 0 is code 5 of
    token 0 and code 9 of token `n`."""
    if bits == 3:
        low, high = packed.split([packed.shape[-2] * 2 // 3, packed.shape[-2] // 3], dim=-2)
        return unpack(low, 2) | unpack(high, 1) << 2
    return torch.cat([(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], dim=-2)
