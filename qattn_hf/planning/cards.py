"""Known GPUs, for answers about a card that is not here. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from qattn_kernels.chip import Chip


class Card(NamedTuple):
    """A GPU, by NVIDIA's data sheets and programming guide.

    Attributes:
        name: as `torch.cuda.get_device_name` has it.
        capability: compute capability.
        multiprocessors: number of multiprocessors.
        shared: KiB of shared memory of a multiprocessor.
        block: KiB of shared memory that a program can have.
        memory: GiB that PyTorch finds, which is less than the card's name says.
        bandwidth: GB/s of its memory.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    block: int
    memory: float
    bandwidth: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        return int(self.memory * 2**30)

    @property
    def chip(self) -> Chip:
        """The card as kernels see it."""
        from qattn_kernels.chip import KIB, Chip

        return Chip(self.multiprocessors, self.shared * KIB, self.name, self.block * KIB, self.capability)


CARDS = {
    "t4": Card("Tesla T4", (7, 5), 40, 64, 64, 14.7, 320),
    "rtx-3090": Card("NVIDIA GeForce RTX 3090", (8, 6), 82, 100, 99, 23.5, 936),
    "rtx-4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 100, 99, 23.5, 1008),
    "rtx-5090": Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 100, 99, 31.3, 1792),
    "l4": Card("NVIDIA L4", (8, 9), 58, 100, 99, 22.0, 300),
    "l40s": Card("NVIDIA L40S", (8, 9), 142, 100, 99, 44.4, 864),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164, 163, 79.1, 2039),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 228, 227, 79.1, 3350),
    "h200": Card("NVIDIA H200", (9, 0), 132, 228, 227, 139.8, 4800),
}
