"""The kernel that reorders a layer's rows against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE

from qattn_hf.methods import get_method
from qattn_kernels.layer.arena import Layout, empty_arena, views
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry
from qattn_kernels.ops.reorder import launch
from qattn_kernels.ops.reorder.reference import largest_bytes, reorder

pytestmark = pytest.mark.gpu
ORDERS = [[1, 0], [2, 0, 0], [3, 2, 1, 0], [0, 1, 2, 3, 3], [7, 7, 7, 0, 4, 4, 5, 6, 6]]
LAYERS = [("turbo", {}), ("sinkq", {}), ("kivi", {"bits": 3}), ("turboquant", {}), ("turbo", {"bits": "mixed"})]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("method", "settings"), LAYERS, ids=str)
def test_rows_move_as_in_the_reference(method: str, settings: dict, order: list[int]):
    """Whatever lies there: rows of a few bytes, of many programs, and of head dims that no word divides."""
    spec = get_method(method)(**settings).last_layer_spec(3)
    layout = Layout(Geometry(len(order), 3, 80, 80, 5, torch.float16), spec)
    arena, specs = empty_arena(layout, torch.device(DEVICE)), layer_tensors(*layout)
    arena.copy_(torch.randint(256, arena.shape, generator=torch.Generator().manual_seed(0)))
    want, rows = arena.clone(), torch.tensor(order, device=DEVICE)
    tensors = [(tensor, specs[name].batch_dim) for name, tensor in views(want, layout).items()]
    reorder(tensors, rows, torch.empty(largest_bytes(tensors), dtype=torch.uint8, device=DEVICE))
    launch.reorder(arena, layout.encode(), 5, rows)
    assert torch.equal(arena, want)


def test_a_number_that_no_row_has_reads_nothing_else():
    spec = get_method("turbo")().last_layer_spec(1)
    layout = Layout(Geometry(2, 1, 64, 64, 1, torch.float16), spec)
    arena = torch.randint(256, empty_arena(layout, torch.device(DEVICE)).shape).to(DEVICE, torch.uint8)
    want = arena.clone()
    launch.reorder(arena, layout.encode(), 1, torch.tensor([2, -1], device=DEVICE))
    assert torch.equal(arena, want)
