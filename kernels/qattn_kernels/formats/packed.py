"""Pack codes of 2 to 4 bits into bytes. This is the specification for `packing`, which does the same in kernels."""

from __future__ import annotations

import torch


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[..., block, D]` along the tokens into bytes `[..., n, D]`, `n = block * bits / 8`.

    Byte `t` holds tokens `t`, `t + n`, ..., the first in its lowest bits. Example: 64 tokens with 4 bits, code 5 in
    token 0 and code 9 in token 32, give 0x95 in byte 0. Tokens that share a byte are far apart, so a mask and a shift
    in a kernel yield whole part tiles instead of interleaved ones. 3-bit codes are stored as their lower two bits, then
    their highest bits."""
    if bits == 3:
        return torch.cat([pack(code & 3, 2), pack(code >> 2, 1)], dim=-2)
    parts = code.chunk(8 // bits, dim=-2)
    out = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        out |= part << (bits * i)
    return out


def unpack(packed: torch.Tensor, bits: int, dim: int = -2) -> torch.Tensor:
    """Unpack bytes `[..., n, D]` to codes `[..., block, D]`, the inverse of `pack`.

    With 4 bits, 0x95 in byte 0 is code 5 of token 0 and code 9 of token `n`. `dim`: the dimension of tokens, -2 or -1
    for bytes `[..., D, n]`."""
    if bits == 3:
        low, high = packed.split([packed.shape[dim] * 2 // 3, packed.shape[dim] // 3], dim=dim)
        return unpack(low, 2, dim) | unpack(high, 1, dim) << 2
    mask, last = 2**bits - 1, 8 - bits
    inner = [(packed >> shift) & mask for shift in range(bits, last, bits)]
    return torch.cat([packed & mask, *inner, packed >> last], dim)
