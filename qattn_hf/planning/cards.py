"""Known GPUs, for answers about a card that is not here. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from qattn_kernels.chip import Chip


class Card(NamedTuple):
    """A GPU, by NVIDIA's data sheets.

    Attributes:
        name: as `torch.cuda.get_device_name` has it.
        capability: compute capability, as 10 * major + minor.
        multiprocessors: number of multiprocessors.
        memory: GiB that PyTorch finds, which is less than the card's name says.
        bandwidth: GB/s of its memory.
    """

    name: str
    capability: int
    multiprocessors: int
    memory: float
    bandwidth: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        return int(self.memory * 2**30)

    @property
    def chip(self) -> Chip:
        """The card as kernels see it."""
        from qattn_kernels.chip import chip_with

        return chip_with(self.capability, self.multiprocessors)._replace(name=self.name)


CARDS = {
    "t4": Card("Tesla T4", 75, 40, 14.7, 320),
    "rtx-3090": Card("NVIDIA GeForce RTX 3090", 86, 82, 23.5, 936),
    "rtx-4090": Card("NVIDIA GeForce RTX 4090", 89, 128, 23.5, 1008),
    "rtx-5090": Card("NVIDIA GeForce RTX 5090", 120, 170, 31.3, 1792),
    "l4": Card("NVIDIA L4", 89, 58, 22.0, 300),
    "l40s": Card("NVIDIA L40S", 89, 142, 44.4, 864),
    "a100": Card("NVIDIA A100-SXM4-80GB", 80, 108, 79.1, 2039),
    "h100": Card("NVIDIA H100 80GB HBM3", 90, 132, 79.1, 3350),
    "h200": Card("NVIDIA H200", 90, 132, 139.8, 4800),
}
