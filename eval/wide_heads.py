"""Errors of kernels by head dim: `python eval/wide_heads.py` prints one JSON row per method and head dim.

    python eval/record.py wide-heads -- python eval/wide_heads.py

A layer takes a prompt of random tokens and one step. Its outputs are compared with fp64 attention over the unquantized
keys and values: the prompt's last queries (`prompt_error`) and the step's (`step_error`), as relative norms. All head
dims have 32 query heads and 4 KV heads, and scores of the same spread.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from qattn_hf.bench.layers import Heads, make_layer
from qattn_hf.methods import Method
from qattn_hf.recipes.recipe import find_recipes
from qattn_kernels.layer.scores import Scores

METHODS = ("int8", "turbo", "turbo_rotated", "kivi:bits=2", "fp8")
DIMS = (128, 256, 512)
HEADS, KV_HEADS = 32, 4
LAST = 64  # queries of the prompt that are compared


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return fp64 attention of the last queries `q` `[1, Hq, n, D]` over `k` and `v` `[1, Hkv, T, D]`."""
    (_, heads, n, dim), tokens = q.shape, k.shape[2]
    hidden = torch.ones(n, tokens, dtype=torch.bool, device=q.device).triu(tokens - n + 1)
    by_head = q.double().unflatten(1, (k.shape[1], -1))
    out = []
    for group, key, value in zip(by_head.unbind(1), k.double().unbind(1), v.double().unbind(1), strict=True):
        scores = (group @ key.mT[:, None] * dim**-0.5).masked_fill(hidden, float("-inf"))
        out.append(scores.softmax(-1) @ value[:, None])
    return torch.stack(out, 1).reshape(1, heads, n, dim)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@torch.no_grad()
def errors(method: Method, dim: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return the errors of a prompt of `tokens` tokens and of the step after it."""
    heads = Heads(HEADS, KV_HEADS, dim, torch.bfloat16)
    layer, scores = make_layer(method, heads, 1, tokens + 1, device), Scores(dim**-0.5)
    random = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, n, tokens + 1, dim, generator=random, dtype=heads.dtype, device=device)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )

    def call(start: int, end: int) -> torch.Tensor:
        part = slice(start, end)
        span = torch.tensor([[0, end - start]], dtype=torch.int32, device=device)
        handle = layer.update(k[:, :, part], v[:, :, part])[0]
        return layer.attend(q[:, :, part], handle, span, scores)[0]

    prompt, step = call(0, tokens), call(tokens, tokens + 1)
    last = slice(tokens - LAST, tokens)
    return {
        "impl": layer.spec.impl,
        "prompt_error": error(prompt[:, :, last], exact(q[:, :, last], k[:, :, :tokens], v[:, :, :tokens])),
        "step_error": error(step, exact(q[:, :, tokens:], k, v)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", help=f"default: {', '.join(METHODS)}")
    parser.add_argument("--dim", type=int, action="append", help=f"default: {', '.join(map(str, DIMS))}")
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, recipe in find_recipes(options.method or list(METHODS)).items():
        for dim in options.dim or DIMS:
            row = {"way": name, "head_dim": dim, "tokens": options.tokens, "heads": HEADS, "kv_heads": KV_HEADS}
            print(json.dumps({**row, **errors(recipe.settings, dim, options.tokens, device)}), flush=True)


if __name__ == "__main__":
    main()
