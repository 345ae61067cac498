"""GEAR-L, the baseline of TurboAttention's Tables 2 and 6: quantized keys and values with a low-rank error correction.

This reference shows the effect on attention and packs nothing. At every call it rounds all tokens that GEAR would have
packed and computes their error again. GEAR does this once per prompt and per buffer, so the reference favours GEAR.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_hf.attention.observe import Call


def rounded(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """`x` as asymmetric codes say it, one step and zero over `dim`."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    return torch.round((x - low) / step) * step + low


def by_channel(x: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """`[..., S, D]`, a channel over `group` tokens, or over all of them."""
    return rounded(x, bits, -2) if group is None else rounded(x.unflatten(-2, (-1, group)), bits, -2).flatten(-3, -2)


def by_token(x: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """A token over `group` channels, or over all of them."""
    group = x.shape[-1] if group is None else min(group, x.shape[-1])
    return rounded(x.unflatten(-1, (-1, group)), bits, -1).flatten(-2)


@dataclass(frozen=True)
class Gear:
    """Attention over keys and values as GEAR-L stores them.

    Attributes:
        bits: of the codes.
        rank: of the error correction of each head; 0 for none.
        group: KIVI's group of key tokens and value channels; None for KCVT, which scales whole key channels and value
            tokens.
        buffer: newest tokens in full precision, which are packed together.
    """

    bits: int
    rank: int = 4
    group: int | None = None
    buffer: int = 64

    def kept(self, x: torch.Tensor, keys: bool, held: int) -> torch.Tensor:
        """`[B, H, S, D]` as a call finds it that comes upon `held` tokens and reads its own as they are."""
        packed = max(0, held - self.buffer) // self.buffer * self.buffer
        if not packed:
            return x
        old = x[:, :, :packed].float()
        codes = (by_channel if keys else by_token)(old, self.bits, self.group)
        if self.rank:
            u, s, v = torch.linalg.svd(old - codes, full_matrices=False)
            codes = codes + u[..., : self.rank] * s[..., None, : self.rank] @ v[..., : self.rank, :]
        return torch.cat([codes.to(x.dtype), x[:, :, packed:]], 2)

    def __call__(self, call: Call) -> torch.Tensor:
        """Causal attention `[B, T, Hq, D]`."""
        if call.scores.softcap or call.scores.window or call.scores.sinks is not None:
            raise ValueError("GEAR's reference knows no softcap, no window and no learned sinks")
        q, held = call.query, call.keys.shape[2] - call.query.shape[2]
        k, v = self.kept(call.keys, True, held), self.kept(call.values, False, held)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        weights = (q @ k.mT * call.scores.scale).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2)
