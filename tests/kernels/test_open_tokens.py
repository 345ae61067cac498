"""A decode's programs for what is in open form: the ring's tiles and the sinks' tiles."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, error, make_layer
from test_fused_kernels import ROUNDING, Inputs, differing, feed, inputs

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.launch.constants import RING_TILE, SINK_TILE
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
POOL: Case = ("turbo", {"sink_num": 3, "sink_window": 2})


def with_sinks(qkv: Inputs, places: list[int]) -> Inputs:
    """Small keys at `places` draw most of the attention: a channel in which others are large lowers their scores."""
    q, k, v = qkv
    k[..., 5] += 6
    q[..., 5] = -6.0
    k[:, :, places] *= 0.05
    return q, k, v


def both(case: Case, qkv: Inputs, capacity: int) -> tuple[QAttnLayer, QAttnLayer]:
    """Two layers after the same prompt, by the reference."""
    layers = make_layer(case, capacity), make_layer(case, capacity)
    for layer in layers:
        feed(reference_step, layer, qkv, [qkv[0].shape[2]])
    return layers


def outputs(layers: tuple[QAttnLayer, QAttnLayer], qkv: Inputs, span: torch.Tensor) -> list[torch.Tensor]:
    """Of a call by the reference and by kernels, whose states agree afterwards."""
    found = []
    for run, layer, past in zip((reference_step, fused_step), layers, ((), (8,)), strict=True):
        found.append(run(*qkv, span, layer.state, layer.spec, Scores(qkv[0].shape[-1] ** -0.5), *past)[0])
    assert differing(*layers) == []
    return found


def parts(qkv: Inputs, cut: int) -> tuple[Inputs, Inputs]:
    q, k, v = qkv
    return (q[:, :, :cut], k[:, :, :cut], v[:, :, :cut]), (q[:, :, cut:], k[:, :, cut:], v[:, :, cut:])


@pytest.mark.parametrize("start", [58, 63, 64], ids=lambda n: f"{n} after the first block")
def test_sinks_are_read_once_whatever_tiles_of_the_ring_are(start: int):
    """Tokens of a call in two tiles of the ring, a block that closes under them, a ring that begins at its middle."""
    qkv = with_sinks(inputs(1, 64 + start + 9), [3, 20, 41])
    before, after = parts(qkv, 64 + start)
    layers = both(POOL, before, 256)
    want, got = outputs(layers, after, torch.tensor([[0, 9]], dtype=torch.int32, device=DEVICE))
    assert error(got, want) < ROUNDING
    assert after[2].norm(dim=-1).mean() > 1.5 * want.norm(dim=-1).mean() > 0, "three values share the attention"


def test_the_ring_is_read_once_whatever_the_table_holds():
    """More tiles of sinks than the ring has, with most of the attention at the open tokens."""
    q, k, v = inputs(1, 645, heads=1)
    k *= torch.linspace(1, 0.3, 645, device=DEVICE)[:, None]  # each block has smaller keys than those before it
    k[:, :, -5:] = 0.4 * q[:, :, -1:]
    before, after = parts((q, k, v), 644)
    layers = both(("turbo", {"sink_num": 8, "sink_window": 128}), before, 704)
    used = int((layers[0].state["sink.born"] > 0).sum())
    assert used > SINK_TILE * layers[0].spec.window.ring // RING_TILE
    want, got = outputs(layers, after, torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE))
    assert error(got, want) < ROUNDING


def test_padding_sees_the_sinks_of_a_row_without_open_tokens():
    qkv = with_sinks(inputs(2, 66), [3, 20, 41])
    before, after = parts(qkv, 64)
    layers = both(POOL, before, 128)
    want, got = outputs(layers, after, torch.tensor([[0, 0], [0, 2]], dtype=torch.int32, device=DEVICE))
    assert want[0].abs().max() > 0 and error(got, want) < ROUNDING


@pytest.mark.parametrize("small", [False, True], ids=["nothing moves", "a sink moves"])
def test_a_block_that_closes_in_a_step_meets_the_pool(small: bool):
    """A full pool that no key of the block is small enough for stays as it is, bit for bit; else its table follows."""
    q, k, v = inputs(1, 130)
    k[:, :, :64] *= 0.1
    k[:, :, 100] *= 0.01 if small else 1.0
    before, after = parts((q, k, v), 126)
    layers = both(POOL, before, 256)
    table = layers[1].state["sink.pos"].clone()
    want, got = outputs(layers, after, torch.tensor([[0, 4]], dtype=torch.int32, device=DEVICE))
    assert torch.equal(table, layers[1].state["sink.pos"]) != small and error(got, want) < ROUNDING
