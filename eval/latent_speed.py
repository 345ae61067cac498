"""Speed of one layer of latent attention (MLA): `python eval/latent_speed.py` prints one JSON row per measurement.

It times steps of one token and prompts in a layer with 512 + 64 values per token, for methods in kernels and in the
reference, and for `stock`. `stock` has keys of 192 and values of 128 channels per head in transformers' cache, and
PyTorch's SDPA with the backend that it chooses. `ms` covers the write and the attention with the latents'
up-projections. `stock` expands latents, as packed layers do for prompts; in steps packed layers absorb the projections.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from qattn_hf.bench.timing import capture, measure, release
from qattn_hf.layer.filled import fill
from qattn_hf.layer.latent_layer import LatentLayer
from qattn_hf.methods import get_method
from qattn_hf.model.latent import layer_spec
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.latent.up import UpProjections

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128  # DeepSeek-V2 and V3
METHODS = ("int8", "turbo", "turbo:bits=2")
HEADS = (128, 16)  # of V3, and of V2-Lite
STEPS, PROMPTS = (
    ((1, 4096), (1, 32768), (16, 4096), (64, 4096)),
    ((1, 512), (1, 4096), (1, 16384), (4, 4096)),
)  # rows and tokens
SCALE = (NOPE + ROPE) ** -0.5
REFERENCE_TOKENS = 4096  # of all rows; beyond it the reference only costs time


def numbers(heads: int, rows: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Latents, RoPE parts and queries of new tokens."""
    parts = ((1, LATENT), (1, ROPE), (heads, NOPE + ROPE))
    latent, rope, query = (torch.randn(rows, n, tokens, d, dtype=torch.bfloat16, device=device) for n, d in parts)
    return latent, rope, query


def up_projections(heads: int, device: torch.device) -> UpProjections:
    """`W_UK` and `W_UV`, views of one weight as in a model."""
    weight = torch.randn(heads, NOPE + VALUE, LATENT, dtype=torch.bfloat16, device=device) / LATENT**0.5
    return UpProjections(weight[:, :NOPE], weight[:, NOPE:])


@torch.no_grad()
def packed(method: str, impl: str, heads: int, rows: int, context: int, tokens: int, device: torch.device) -> Any:
    """Time a call of `tokens` new tokens after `context` others."""
    name, settings = split_method(method)
    chosen = get_method(name)(**settings)
    spec = replace(layer_spec(chosen.without_default_pool(chosen.last_layer_spec(1)), name), impl=impl)
    layer, up = LatentLayer(spec, context + tokens + spec.window.block), up_projections(heads, device)
    latent, rope, query = numbers(heads, rows, tokens, device)
    layer.lazy_initialization(rope, latent)
    fill(layer, context)
    assert layer.arena is not None
    arena, kept = layer.arena, layer.arena.clone()
    span = torch.tensor([[0, tokens]], dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        return layer.attend_latents(query, layer.update(latent, rope)[0], span, Scores(SCALE), True, up)

    def restore() -> None:
        arena.copy_(kept)
        layer._used = None

    run()
    restore()
    captured = tokens == 1 and impl == "triton"
    return measure(capture([run], device) if captured else run, device, prepare=restore)


@torch.no_grad()
def stock(heads: int, rows: int, context: int, tokens: int, device: torch.device) -> Any:
    """Times of the same over expanded keys and values."""
    k, v = (
        torch.randn(rows, heads, context + tokens, dim, dtype=torch.bfloat16, device=device)
        for dim in (NOPE + ROPE, VALUE)
    )
    last, up = torch.arange(context, context + tokens, device=device), up_projections(heads, device)
    latent, rope, query = numbers(heads, rows, tokens, device)

    def run() -> torch.Tensor:
        key, value = up.expand_kv(latent, rope)
        k.index_copy_(2, last, key)
        v.index_copy_(2, last, value)
        return F.scaled_dot_product_attention(query, k, v, is_causal=tokens > 1, scale=SCALE)

    run()
    return measure(capture([run], device) if tokens == 1 else run, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small point")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads_of, steps, prompts = (HEADS, STEPS, PROMPTS) if not options.quick else ((4,), ((1, 64),), ((1, 64),))
    points = [(rows, n, 1) for rows, n in steps] + [(rows, 0, n) for rows, n in prompts]
    for heads in heads_of:
        for rows, context, tokens in points:
            about = {"heads": heads, "rows": rows, "context": context, "new_tokens": tokens, "dtype": "bfloat16"}
            point = (heads, rows, context, tokens, device)
            impls = ["triton"] if device.type == "cuda" else []
            if rows * (context + tokens) <= REFERENCE_TOKENS + 1:
                impls.append("reference")
            ways: list[tuple[str, str, Callable[[], Any]]] = [("stock", "sdpa", partial(stock, *point))]
            ways += [(method, impl, partial(packed, method, impl, *point)) for method in METHODS for impl in impls]
            for method, impl, run in ways:
                times = run()
                figures = {"ms": times.median, "low": times.low, "high": times.high, "runs": times.runs}
                print(json.dumps({**about, "method": method, "impl": impl, **figures}), flush=True)
                release(device)


if __name__ == "__main__":
    main()
