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


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes `[..., n, D]` to codes `[..., block, D]`, the inverse of `pack`.

    With 4 bits, 0x95 in byte 0 is code 5 of token 0 and code 9 of token `n`."""
    if bits == 3:
        low, high = packed.split([packed.shape[-2] * 2 // 3, packed.shape[-2] // 3], dim=-2)
        return unpack(low, 2) | unpack(high, 1) << 2
    return torch.cat([(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], dim=-2)


def unpack_to_float(packed: torch.Tensor, bits: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the codes of `unpack` in fp32 `[..., block, D]`, in new memory or in `out`. 8 bits are codes as they are.

    Bytes become numbers in one pass over the result."""
    tokens = packed.shape[-2]
    if out is None:
        out = packed.new_empty((*packed.shape[:-2], tokens * 8 // bits, packed.shape[-1]), dtype=torch.float32)
    if bits == 8 or bits == 3:
        return out.copy_(packed if bits == 8 else unpack(packed, bits))
    for i in range(8 // bits):
        code = packed >> (bits * i) if i else packed
        code = code & (2**bits - 1) if i + 1 < 8 // bits else code
        out.narrow(-2, i * tokens, tokens).copy_(code)
    return out
