"""KIVI's per-channel keys, each divided by its norm first, so that channel ranges cover directions only.

A key much smaller than the others, such as an attention sink's, lies between the levels of every channel. Its error
then affects a score that holds most of the attention of most queries. OScaR divides keys by their norms, and KVarN
balances deviations of tokens and channels in turn. Here a single division by the norm gave the gain."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Block, Operand, write_rows
from qattn_kernels.formats.kivi.reference import KiviFormat
from qattn_kernels.formats.scales import from_bits, to_bits
from qattn_kernels.formats.turboquant.reference import tree_sum
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


def norms(x: torch.Tensor) -> torch.Tensor:
    """Return the bits `[..., tokens]` of each token's root mean square over channels, for fp32 `[..., tokens, D]`.

    Squares are added in the order of `tree_sum`. `formats/scales.py` defines the bits."""
    dim = x.shape[-1]
    padded = torch.nn.functional.pad(x * x, (0, (1 << (dim - 1).bit_length()) - dim))
    return to_bits(torch.sqrt(tree_sum(padded) * (1 / dim)))


@dataclass(frozen=True)
class KiviNormFormat(KiviFormat):
    """KIVI of keys divided by their norms, with a 16-bit norm per token."""

    name = "kivi_norm"

    def tile(self, dim: int, block: int) -> int:
        return 1  # its scores read one block at a time

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks, window.block)
        return super().tensors(geo, window, dim) | {"norm": TensorSpec(shape, torch.int16, block_dim=2)}

    def write(self, state: State, block: Block) -> None:
        x = block.tokens.x.float()
        norm = norms(x)
        write_rows(state["norm"], block.index, block.write, norm)
        unit = x / torch.where(norm == 0, 1.0, from_bits(norm))[..., None]
        super().write(state, dataclasses.replace(block, tokens=Operand(unit, None)))

    def numbers(self, state: State, blocks: int) -> torch.Tensor:
        return super().numbers(state, blocks) * from_bits(state["norm"][:, :, :blocks])[..., None]
