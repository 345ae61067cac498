"""Operations on a layer's state between its calls, for packages above: edits, and readers for reports.

Each name is documented where it is defined. The first kernel launch loads Triton."""

from __future__ import annotations

import torch

from qattn_kernels.formats.scales import to_bits
from qattn_kernels.ops.crop.front import (
    beyond_crop,
    drop_front,
    held_back,
    left_behind,
    most_left_behind,
    ring_blocks,
)
from qattn_kernels.ops.crop.launch import crop
from qattn_kernels.ops.crop.ring import resized_ring
from qattn_kernels.ops.keep.reference import Stored, kept_tokens, stored_tokens, write_kept
from qattn_kernels.ops.reorder.reference import Tensors, largest_bytes
from qattn_kernels.ops.reorder.reference import reorder as reorder_tensors
from qattn_kernels.ops.repack.reference import repack
from qattn_kernels.ops.rotate.reference import rotate, rotate_back
from qattn_kernels.ops.sink_pool.table import at_slots
from qattn_kernels.reference.rows import bits_to_bool, bool_to_bits

__all__ = [
    "Stored",
    "Tensors",
    "at_slots",
    "beyond_crop",
    "bits_to_bool",
    "bool_to_bits",
    "crop",
    "drop_front",
    "held_back",
    "kept_tokens",
    "largest_bytes",
    "left_behind",
    "most_left_behind",
    "reorder_arena",
    "reorder_tensors",
    "repack",
    "resized_ring",
    "ring_blocks",
    "rotate",
    "rotate_back",
    "stored_tokens",
    "to_bits",
    "write_kept",
]


def reorder_arena(arena: torch.Tensor, layout: str, blocks: int, rows: torch.Tensor) -> None:
    """Run `reorder_tensors` as a kernel on the whole state of a layer. Arguments are as in
    `ops.reorder.launch.reorder`."""
    from qattn_kernels.ops.reorder.launch import reorder

    reorder(arena, layout, blocks, rows)
