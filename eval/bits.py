"""Bits of a cached value, read from the tensors of filled caches: `python eval/bits.py` prints one JSON row a case.

One layer with 8 KV heads is filled with random keys and values, in room for exactly these tokens, as `generate` plans
it. `effective_bits` is that of closed blocks; `effective_bits_total` counts ring and spare room too.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from transformers import LlamaConfig

from qattn_hf import QAttnCache, report
from qattn_hf.recipe import find_recipe
from qattn_kernels.append.reference import append
from qattn_kernels.rows import build_region

KV_HEADS = 8
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("int8", {}),
    ("fp8", {}),
    ("turbo", {}),
    ("turbo", {"bits": "mixed"}),
    ("turbo", {"bits": 2}),
    ("kivi", {"bits": 4}),
    ("kivi", {"bits": 2}),
    ("kivi", {"bits": 2, "group_size": 128, "residual_length": 32}),
]


def filled_cache(method: str, settings: dict[str, Any], head_dim: int, tokens: int, chunk: int = 2048) -> QAttnCache:
    """A cache of one layer that holds `tokens` random tokens; attention is not computed."""
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=head_dim
    )
    recipe = find_recipe(method, None, settings)
    cache = QAttnCache(recipe.layer_specs(config), recipe)
    cache.plan(tokens)
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, tokens, chunk):
        count = min(chunk, tokens - begin)
        k, v = torch.randn(2, 1, KV_HEADS, count, head_dim, generator=generator).bfloat16()
        layer.update(k, v)
        layer.reserve(count)
        real = torch.tensor([count], dtype=torch.int32)
        append(layer.state, layer.spec, build_region(layer.state, layer.spec, k, v, real), real, count)
    return cache


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the bits of a cached value, one JSON row a case.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    options = parser.parse_args(arguments)
    for method, settings in METHODS:
        for head_dim in options.head_dims:
            for tokens in options.tokens:
                data = report(filled_cache(method, settings, head_dim, tokens)).to_dict()
                row = {"method": method, **settings, "head_dim": head_dim, "kv_heads": KV_HEADS, "tokens": tokens}
                row |= {key: data[key] for key in ("packed_tokens", "effective_bits", "effective_bits_total")}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
