"""Bits of a cached value, read from the tensors of filled caches: `python eval/bits.py` prints one JSON row a case.

One layer with 8 KV heads is put directly into its state after a number of random tokens, with capacity for exactly
these, as `generate` plans it. The bits depend only on the tensors' contents, not on how they were written.
`effective_bits` counts closed blocks; `effective_bits_total` adds the ring, the sink pool and spare capacity.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from transformers import LlamaConfig

from qattn_hf import QAttnCache, report
from qattn_hf.layer.filled import fill
from qattn_hf.methods import measured_settings
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.recipes.spelling import split_method

KV_HEADS, LAYERS = 8, 8


def filled_cache(method: str, settings: dict[str, Any], head_dim: int, tokens: int) -> QAttnCache:
    """A cache of one layer, the last of a model, which no setting spares, in the state after `tokens` tokens."""
    config = LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=head_dim
    )
    recipe = find_recipe(method, None, settings)
    cache = QAttnCache(recipe.layer_specs(config)[-1:], recipe)
    cache.plan(tokens)
    layer = cache.layers[0]
    nothing = torch.empty(1, KV_HEADS, 0, head_dim, dtype=torch.bfloat16)
    layer.lazy_initialization(nothing, nothing)
    fill(layer, tokens)
    return cache


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the bits of a cached value, one JSON row a case.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--method", action="append", metavar="METHOD", help="such as turbo:bits=2, may be repeated")
    options = parser.parse_args(arguments)
    for method, settings in map(split_method, options.method or measured_settings("bits")):
        for head_dim in options.head_dims:
            for tokens in options.tokens:
                data = report(filled_cache(method, settings, head_dim, tokens)).to_dict()
                row = {"method": method, **settings, "head_dim": head_dim, "kv_heads": KV_HEADS, "tokens": tokens}
                row |= {key: data[key] for key in ("packed_tokens", "effective_bits", "effective_bits_total")}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
