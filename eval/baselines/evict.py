"""Baselines of SinkQ's Tables 7 and 8, as references of their effect on attention.

StreamingLLM, H2O and SnapKV drop tokens of a prompt. ZipCache rounds them to 4 or 2 bits by the attention they get. The
first call is the prompt and is read unchanged. The attention of its last queries then chooses the tokens to drop or
round, as in SinkQ's appendix. Later tokens stay unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from baselines.gear import by_channel, rounded

from qattn_hf.attention.observe import Call

WINDOW, FIRST, POOL = 32, 4, 7  # queries that choose; StreamingLLM's sinks; tokens over which SnapKV takes the mean


def weights(q: torch.Tensor, k: torch.Tensor, scale: float, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention `[B, Hq, T, S]` of the last queries, without keys that are `hidden` `[B, H, S]`."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    if hidden is not None:
        seen = seen & ~hidden.repeat_interleave(groups, 1)[:, :, None]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def attention_of(call: Call) -> torch.Tensor:
    """`[B, H, S]`, what each token gets from the last queries of a prompt."""
    got = weights(call.query[:, :, -WINDOW:], call.keys, call.scores.scale).sum(2)
    return got.unflatten(1, (call.keys.shape[1], -1)).sum(2)


@dataclass
class Evict:
    """An attention over what is left of a prompt: the most attended and the newest tokens, or the first and the newest.

    Attributes:
        how: which method.
        share: of the prompt's tokens that stay.
        dropped: of each layer, `[B, H, P]`; set by the first call of a text.
    """

    how: Literal["streaming", "h2o", "snapkv"]
    share: float = 0.16
    dropped: dict[int, torch.Tensor] = field(default_factory=dict)

    def choose(self, call: Call) -> torch.Tensor:
        got = attention_of(call)
        tokens, stay = got.shape[-1], max(2, round(self.share * got.shape[-1]))
        newest = {"streaming": stay - FIRST, "h2o": stay // 2, "snapkv": min(WINDOW, stay // 2)}[self.how]
        if self.how == "snapkv":
            got = torch.nn.functional.avg_pool1d(got, POOL, 1, POOL // 2)
        elif self.how == "streaming":
            got = -torch.arange(tokens, device=got.device, dtype=got.dtype).expand_as(got).clone()
        got[..., tokens - newest :] = torch.inf
        return torch.ones_like(got, dtype=torch.bool).scatter_(-1, got.topk(stay).indices, False)

    def __call__(self, call: Call) -> torch.Tensor:
        if call.keys.shape[2] == call.query.shape[2]:
            self.dropped[call.layer] = self.choose(call)
            return call.out
        later = call.keys.shape[2] - self.dropped[call.layer].shape[2]
        hidden = torch.nn.functional.pad(self.dropped[call.layer], (0, later))
        values = call.values.repeat_interleave(call.query.shape[1] // call.values.shape[1], 1)
        return (weights(call.query, call.keys, call.scores.scale, hidden) @ values).transpose(1, 2)


@dataclass
class ZipCache:
    """Attention over a prompt with 4 bits for the most attended tokens and 2 bits for the others.

    Keys are rounded by channel, values by token after each channel is divided by the root of its largest magnitude.

    Attributes:
        share: of the tokens, that get 4 bits.
        kept: keys and values of the prompt, by layer; the first call of a text sets them.
    """

    share: float = 0.2
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def choose(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        got = attention_of(call)
        much = torch.zeros_like(got, dtype=torch.bool)
        much.scatter_(-1, got.topk(round(self.share * got.shape[-1])).indices, True)
        size = call.values.abs().amax(2, keepdim=True).sqrt().clamp(min=1e-6)
        k4, k2 = (by_channel(call.keys, bits, None) for bits in (4, 2))
        v4, v2 = (rounded(call.values / size, bits, -1) * size for bits in (4, 2))
        return torch.where(much[..., None], k4, k2), torch.where(much[..., None], v4, v2)

    def __call__(self, call: Call) -> torch.Tensor:
        if call.keys.shape[2] == call.query.shape[2]:
            self.kept[call.layer] = self.choose(call)
            return call.out
        k, v = (
            torch.cat([old, new[:, :, old.shape[2] :]], 2)
            for old, new in zip(self.kept[call.layer], (call.keys, call.values), strict=True)
        )
        v = v.repeat_interleave(call.query.shape[1] // v.shape[1], 1)
        return (weights(call.query, k, call.scores.scale) @ v).transpose(1, 2)
