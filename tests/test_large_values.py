"""Keys and values far beyond fp16, as a model in bf16 or fp32 has them: the same error, or scales that a report counts.

All keys (values) of a model are multiplied by a factor, and what reads them is divided by it: the function is the same.
"""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids, tiny_llama
from test_models import FEW

from qattn_hf import list_methods, patch, report

IDS = random_ids(2, 200)
FACTORS = [("v", 1e5), ("v", 3e6), ("k", 3e4), ("k", 3e6), ("v", 1e-3), ("v", 1e-5), ("k", 1e-5)]
METHODS = [
    *list_methods(),
    "turbo:v_scale=token",
    "kivi:residual_length=0,token_norm=True",
    "turboquant:k_format=q4,v_format=q8",
    "turbo:smooth_k=True",
]
IN_FP16 = ("kivi", "sinkq", "low", "q4")  # methods with a zero point or a signed scale


def scaled(side: str, factor: float):
    model = tiny_llama(num_hidden_layers=1, head_dim=64, initializer_range=0.15)
    attention = model.model.layers[0].self_attn
    (attention.k_proj if side == "k" else attention.v_proj).weight.data.mul_(factor)
    (attention.q_proj if side == "k" else attention.o_proj).weight.data.div_(factor)
    return model


@torch.inference_mode()
def steps(model):
    cache = model(IDS[:, :192]).past_key_values
    logits = [model(IDS[:, i : i + 4], past_key_values=cache).logits for i in (192, 196)]
    return torch.cat(logits, 1), cache


@pytest.fixture(scope="module")
def exact():
    return steps(scaled("v", 1))[0]


@pytest.mark.parametrize("method", [m if m in FEW else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_the_error_is_the_same_at_every_factor_or_scales_are_counted(exact, method: str):
    def error(side: str, factor: float) -> tuple[float, int]:
        got, cache = steps(patch(scaled(side, factor), method))
        rows = report(cache).to_dict()["layers"] if hasattr(cache, "recipe") else []
        counted = sum(row["clamped_scales"] for row in rows)
        assert (f"{counted} scales at the end of fp16" in str(report(cache))) if counted else True
        return ((got - exact).abs().max() / exact.std()).item(), counted

    base, counted = error("v", 1)
    assert counted == 0
    may_clamp = any(name in method for name in IN_FP16)
    for side, factor in FACTORS:
        # powers of ten round otherwise; a method's own random error varies by less than a factor of 2
        grown, counted = error(side, factor)
        assert may_clamp or not counted
        assert grown < 2 * base + 1e-4 or counted, f"{side} * {factor:g}: {grown:.2g}, at factor 1 {base:.2g}"


def test_a_crop_takes_the_count_back():
    model = patch(scaled("v", 1e7), "turboquant:v_format=q4")
    _, cache = steps(model)
    few = report(cache).to_dict()["layers"][0]["clamped_scales"]
    assert few > 0
    cache.crop(-150)
    left = report(cache).to_dict()["layers"][0]["clamped_scales"]
    assert 0 <= left < few
    cache.crop(-50)
    assert report(cache).to_dict()["layers"][0]["clamped_scales"] == 0
