"""Slots without a token: they are in no mean, no scale and no range, whatever numbers lie there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_layer, random_qkv

from qattn_kernels.formats.base import Operand, int8_tokens
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.formats.smoothed.reference import SmoothedFormat
from qattn_kernels.reference.operands import operands
from qattn_kernels.reference.tiles import FOREVER, Tiles

TOKENS, BLOCK = 70, 64  # the second tile of two has 6 tokens


def tiles(k: torch.Tensor, v: torch.Tensor) -> Tiles:
    """The tokens of `k` and `v` `[1, 2, TOKENS, D]` in two tiles, whose other slots hold large numbers."""

    def in_tiles(x: torch.Tensor) -> Operand:
        garbage = torch.full((1, 2, 2 * BLOCK - TOKENS, x.shape[-1]), 1e4)
        return Operand(torch.cat([x, garbage], 2).view(1, 2, 2, BLOCK, -1), None)

    pos = torch.arange(2 * BLOCK, dtype=torch.int32).view(1, 1, 2, BLOCK)
    since = torch.where(pos < TOKENS, pos, FOREVER)
    keep = torch.ones(1, 2, 2, BLOCK, dtype=torch.bool)
    return Tiles(in_tiles(k), in_tiles(v), pos, since, torch.full_like(since, FOREVER), keep)


@pytest.mark.parametrize("settings", [{}, {"bits": 4, "smooth_v": True}, {"granularity": "token"}], ids=str)
def test_a_prompts_codes_are_those_of_its_tokens_alone(settings: dict[str, Any]):
    _, k, v = random_qkv(1, TOKENS, dim=32)
    k = k + 3.0
    spec = make_layer(("sage2", settings)).spec
    coded = operands(tiles(k, v), spec)
    assert coded.k.mean is not None
    torch.testing.assert_close(coded.k.mean[:, :, 0, 0], k.mean(2))
    for side, x in ((coded.k, k), (coded.v, v)):
        read = side.dequantize().flatten(2, 3)[:, :, :TOKENS]
        # a code of 4 bits is off by half a step of a seventh of the range, of keys around their mean
        assert (read - x).abs().max() < x.abs().max() / 7


@pytest.mark.parametrize("kept", [0.0, 5.0], ids=["no mean yet", "a mean"])
def test_smoothed_blocks_have_zeros_where_no_token_is(kept: float):
    """Less the mean, a slot without a token would have the largest code of its channel, and coarsen all others."""
    _, k, _ = random_qkv(1, TOKENS, dim=32)
    form = SmoothedFormat(inner=FlashQFormat(bits=4))
    padded, shifted = (
        torch.nn.functional.pad(x, (0, 0, 0, 2 * BLOCK - TOKENS)).view(1, 2, 2, BLOCK, -1) for x in (k, k + 5.0)
    )
    coded = form.block_form(int8_tokens(shifted), {"mean": torch.full((1, 2, 32), kept)})
    assert torch.equal(coded.x[:, :, 1, TOKENS - BLOCK :], torch.zeros_like(coded.x[:, :, 1, TOKENS - BLOCK :]))
    if kept:  # as fine as codes of keys without a mean
        plain = form.core.block_form(int8_tokens(padded), {})
        errors = [
            (x.dequantize().flatten(2, 3)[:, :, :TOKENS] - y).abs().mean() for x, y in ((coded, k + 5.0), (plain, k))
        ]
        assert errors[0] < 2 * errors[1]
