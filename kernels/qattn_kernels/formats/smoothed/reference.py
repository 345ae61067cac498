"""Smoothed keys: a row's mean key is subtracted before another format quantizes them, and stored separately.

This is SageAttention2's smoothing of K. The channel mean shared by all keys adds the same constant to a query's scores,
so codes need not span it. Scores here add the mean's part back and equal those of the true keys. Soft caps, learned
sinks and the log-sum-exp therefore stay correct."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace

import torch

from qattn_kernels.formats.base import Arrival, Block, FixedBy, Format, Operand
from qattn_kernels.formats.int_group.reference import IntGroupFormat
from qattn_kernels.formats.side import Side
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of fp32 `[..., tokens, D]`, adding halves until one token is left.

    Kernels add in the same order."""
    while x.shape[-2] > 1:
        first, second = x.chunk(2, -2)
        x = first + second
    return x[..., 0, :]


@dataclass(frozen=True)
class SmoothedFormat(Format):
    """Keys in the format `inner`, minus the mean key of their row's first block.

    The mean is fixed when that block closes. The ring is the inner format's and holds tokens without smoothing, because
    a row without a block has no mean."""

    inner: Format = field(default_factory=IntGroupFormat)

    name = "smoothed"
    windowed = True

    @property
    def core(self) -> Format:
        return self.inner

    def of_process(self, own: range, size: int) -> Format:
        return replace(self, inner=self.core.of_process(own, size))

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        return self.core.side(heads, dim, block, values)._replace(SMOOTH=True)

    @property
    def label(self) -> str:
        return f"{self.core.label} around a mean"

    @property
    def integer(self) -> bool:  # type: ignore[override]
        return self.core.integer

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        return self.core.tensors(geo, window, dim) | {"mean": TensorSpec((geo.batch, geo.heads, dim), torch.float32)}

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return self.core.ring_tensors(geo, slots, dim)

    def ring(self, state: State) -> Operand:
        return self.core.ring(state)

    @property
    def token_levels(self) -> int | None:
        return self.core.token_levels

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        return self.core.quantize_tokens(new, state)

    def block_form(self, tokens: Operand, state: State) -> Operand:
        """Return the inner format's block form of tokens minus the row's mean, with that mean as `mean`.

        A row without a mean uses the mean of its first block's tokens, where empty slots count as zeros. Any mean gives
        the same scores."""
        if not self.integer:
            return self.core.block_form(tokens, state)
        x = tokens.dequantize()
        first = tree_sum(x[:, :, 0]) / x.shape[-2]
        fixed = (state["mean"] != 0).any(-1, keepdim=True)
        mean = torch.where(fixed, state["mean"], first)[:, :, None, None]
        filled = (tokens.scales != 0)[..., None]  # empty slots, masked slots and zeros have scale 0
        coded = self.core.block_form(self.core.requantize(torch.where(filled, x - mean, 0.0)), state)
        return coded._replace(mean=mean.expand(-1, -1, x.shape[2], -1, -1))

    def write(self, state: State, block: Block) -> None:
        keep, x = block.keep[..., None], block.tokens.dequantize()
        count = keep.sum(-2).clamp(min=1)
        mean = tree_sum(torch.where(keep, x, 0.0)) / count
        first = (block.write & (block.index == 0))[:, None, None]
        state["mean"].copy_(torch.where(first, mean, state["mean"]))
        centered = torch.where(keep, x - state["mean"][:, :, None], 0.0)
        self.core.write(state, dataclasses.replace(block, tokens=self.core.requantize(centered)))

    def read(self, state: State, blocks: int) -> Operand:
        read = self.core.read(state, blocks)
        mean = state["mean"][:, :, None, None].expand(-1, -1, read.x.shape[2], -1, -1)
        return read._replace(mean=mean)

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        return self.core.bits_per_head(state, heads)

    @property
    def fixed(self) -> dict[str, FixedBy]:
        return {**self.core.fixed, "mean": FixedBy.BLOCK}
