"""KIVI's keys by channel, each divided by its norm first: what is left of a channel's range is its direction.

A key far smaller than the others, as of an attention sink, lies between the levels of every channel, and its whole
error goes into a score that most queries give most of their mass. OScaR divides keys by their norms, and KVarN balances
deviations of tokens and channels in turns; one division by the norm is what gained here.
"""

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
    """Bits `[..., tokens]` of the root mean square of the channels of fp32 `[..., tokens, D]`, added in the order of
    `tree_sum`: see `formats/scales.py`."""
    dim = x.shape[-1]
    padded = torch.nn.functional.pad(x * x, (0, (1 << (dim - 1).bit_length()) - dim))
    return to_bits(torch.sqrt(tree_sum(padded) * (1 / dim)))


@dataclass(frozen=True)
class KiviNormFormat(KiviFormat):
    """KIVI of keys over their norms, with a norm of 16 bits a token of a block."""

    name = "kivi_norm"

    def tile(self, dim: int, block: int) -> int:
        return 1  # its scores are of one block

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


FORMAT = KiviNormFormat
