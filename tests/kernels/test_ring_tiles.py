"""Open tokens that begin inside a tile of the ring: decode reads that tile, whose first slots hold other tokens."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, make_layer
from test_fused_kernels import feed, inputs

from qattn_kernels.launch.constants import RING_TILE
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_grad")]


def test_the_tile_in_which_the_open_tokens_begin_is_read():
    case = ("kivi", {"bits": 4, "group_size": 32, "residual_length": 32})
    qkv = inputs(1, 84)
    layers = [make_layer(case, max_cache_len=96) for _ in range(2)]
    layers[0].lazy_initialization(*(x[:, :, :0] for x in qkv[1:]))
    ours, theirs = (
        feed(run, layer, qkv, [83, 84]) for run, layer in zip((fused_step, reference_step), layers, strict=True)
    )
    start = int(layers[0].state["open_start"])
    assert start % RING_TILE and RING_TILE < 84, "the open tokens begin inside a tile, and more are in the next one"
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-4 if DEVICE == "cpu" else 1e-3)  # fp32 sums
