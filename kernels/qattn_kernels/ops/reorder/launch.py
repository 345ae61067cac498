"""Launch the kernel that reorders a layer's rows."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from qattn_kernels.launch.constants import power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.plan import planned
from qattn_kernels.layer.arena import decode_layout, places
from qattn_kernels.ops.reorder.kernel import CHUNK, WORD, reorder_kernel

NUMBERS = 2048  # values that a program holds at a time


def reorder(arena: torch.Tensor, layout: str, blocks: int, rows: torch.Tensor) -> None:
    """Row i of a layer becomes its old row `rows[i]`, in place.

    Args:
        arena: uint8, all state of the layer.
        layout, blocks: as for `step.operator.attend`.
        rows: int `[B]`, on the arena's device. A row with an invalid number stays as it is.
    """
    batch, rows = rows.shape[0], rows.contiguous()
    chunks = chunks_of(layout, batch, blocks, arena.device)
    key = "reorder", layout, blocks, batch, rows.dtype, arena.device
    planned(key, (arena, rows, chunks), partial(_launch, arena, rows, chunks))


def _launch(arena: torch.Tensor, rows: torch.Tensor, chunks: torch.Tensor) -> tuple[()]:
    most = power_of_two(len(rows))
    with torch.cuda.device_of(arena):
        launch(
            reorder_kernel, (len(chunks),), arena, rows, chunks, len(rows),
            MOST=most, UNITS=max(1, NUMBERS // most), WORD=WORD, num_warps=4,
        )  # fmt: skip
    return ()


@lru_cache(maxsize=16)
def chunks_of(layout: str, batch: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Return the chunk that each program moves, int64 `[n, 3]` (see `reorder_kernel`)."""
    found = []
    for begin, tensor in places(decode_layout(layout, batch, blocks))[0].values():
        if tensor.batch_dim is not None:
            stride = tensor.nbytes() // batch
            found += [(begin + at, stride, min(CHUNK, stride - at)) for at in range(0, stride, CHUNK)]
    return torch.tensor(found, dtype=torch.int64, device=device)
