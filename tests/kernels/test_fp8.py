"""FP8 tokens against their definition."""

from __future__ import annotations

import pytest
import torch
from helpers import feed, make_layer, random_qkv

from qattn_hf import RecipeError
from qattn_hf.recipes.recipe import find_recipe
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.formats.fp8.reference import fp8_tokens
from qattn_kernels.layer.state import side_of


def test_tokens_by_hand():
    """448 is the largest number; between 256 and 448 they lie 32 apart, below 2^-6 2^-9."""
    x = torch.tensor([[448.0, 271.0, 272.0, 0.0025, -0.0025], [0.0, 0.0, 0.0, 0.0, 0.0]])
    tokens = fp8_tokens(x)
    assert tokens.scales.tolist() == [1.0, 0.0]
    assert tokens.x.tolist() == [[448.0, 256.0, 256.0, 2**-9, -(2**-9)], [0.0] * 5]  # 272 is a tie, to even


def test_no_zero_is_negative():
    codes = fp8_tokens(torch.tensor([[448.0, -1e-4]])).x.to(torch.float8_e4m3fn)
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0]]


def test_no_token_overflows():
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    x *= 10.0 ** torch.linspace(-37, 37, 4096)[:, None]
    tokens = fp8_tokens(x)
    assert tokens.x.isfinite().all() and tokens.x.abs().max() == 448
    normal = tokens.scales > 0
    error = (tokens.dequantize() - x).abs()[normal]
    assert (error <= x.abs()[normal] / 16 * 1.001 + tokens.scales[normal][:, None] * 2**-10).all()


def test_it_serves_tokens_with_outliers_better_than_int8():
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 60
    small = torch.arange(64) != 3
    errors = [(make(x).dequantize() - x)[:, small].norm() for make in (fp8_tokens, lambda x: int8_tokens(x, 127))]
    assert errors[0] < errors[1] / 4


def test_bytes_in_memory_are_those_of_torch():
    _, k, v = random_qkv(1, 64)
    layer = make_layer(("fp8", {}))
    feed(layer, torch.zeros(1, 4, 64, 32), k, v, [64])
    codes = side_of(layer.state, "k")["codes"][0, :, 0].view(torch.float8_e4m3fn).float()
    assert torch.equal(codes, fp8_tokens(k).x[0].float())
    assert torch.equal(
        layer.spec.v.read(side_of(layer.state, "v"), 1).dequantize()[0, :, 0], fp8_tokens(v).dequantize()[0]
    )


@pytest.mark.parametrize("v_scale", ["block", "prompt"])
def test_values_by_channel_by_hand(v_scale: str):
    """Each channel of a block, or of a row's first block for all blocks, has the scale that maps its largest value to
    448. Larger values in later blocks are clamped and counted."""
    q, k, v = random_qkv(2, 192)
    v[:, :, 64:128] *= 3
    layer = make_layer(("paper_sage2", {"v_scale": v_scale}))
    feed(layer, q, k, v, [100, *range(120, 193, 12)])
    blocks = v.unflatten(2, (3, 64))
    scale = blocks.abs().amax(3, keepdim=True) / 448
    scale = scale if v_scale == "block" else scale[:, :, :1]
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(layer.spec.v.read(side_of(layer.state, "v"), 3).x, codes * scale)
    if v_scale == "prompt":
        beyond = (blocks.abs() > scale * 448 * (1 + 1e-6)).sum((2, 3, 4))
        assert torch.equal(layer.state["v.clamped"], beyond) and (beyond > 100).all()


@pytest.mark.parametrize("key", ["compute", "decode_compute"])
def test_products_of_integers_are_refused(key: str):
    with pytest.raises(RecipeError, match=f"{key}='int8' clashes with method 'fp8'"):
        find_recipe("fp8", None, {key: "int8"})
