"""Launch every kernel of every method at least once, for compute-sanitizer: one JSON row per setting.

    compute-sanitizer --tool racecheck --error-exitcode 9 --report-api-errors no \\
        --kernel-name-exclude kernel_substring=at:: python eval/every_kernel.py

For each setting, a layer with two rows, one of them padded, takes a prompt, steps, a draft, a later prompt that ends
two tokens before blocks close, and steps that close these blocks. Tokens are removed within the ring and from closed
blocks, which then close again, and rows are reordered. Finally the layer is emptied, and a draft closes its rows' first
blocks. The outputs are not checked here; tests do that.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from qattn_hf.bench.layers import Heads, make_layer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import measured_settings
from qattn_hf.recipes.recipe import find_recipes
from qattn_kernels.layer.scores import Scores

HEADS = Heads(4, 2, 128, torch.bfloat16)
PADDED = 9  # columns of the second row's prompt that are padding
TAKEN_BACK = {3: 3, 8: 70}  # tokens that a draft's rejection and a `crop` remove, by the number of the call before
OTHERS = ("turbo:bits=mixed", "turbo:sparse_v_tau=1e-4", "turbo:softmax=sas", "kivi")


def attend(layer: QAttnLayer, tokens: int, padded: bool) -> bool:
    """Whether the output of a call of `tokens` random tokens is finite."""
    device = layer.device
    q, k, v = (
        torch.randn(2, heads, tokens, HEADS.dim, dtype=HEADS.dtype, device=device)
        for heads in (HEADS.query, HEADS.kv, HEADS.kv)
    )
    first = torch.tensor([0, PADDED if padded else 0], dtype=torch.int32, device=device)
    span = torch.stack([first, tokens - first], 1)
    out, _ = layer.attend(q, layer.update(k, v)[0], span, Scores(HEADS.dim**-0.5))
    return bool(out.isfinite().all())


def main(arguments: list[str]) -> None:
    made = argparse.ArgumentParser(description="Launch every kernel of every method.")
    made.add_argument("--method", action="append", help="default: all that decode is measured with, and variants")
    options = made.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = options.method or [*dict.fromkeys((*measured_settings("decode"), *OTHERS))]
    for name, recipe in find_recipes(chosen).items():
        layer = make_layer(recipe.settings, HEADS, 2, 1024, device)
        window = layer.spec.window
        calls = [200, 1, 1, 5]  # a prompt, steps, a draft
        spans = max(4, -(-(sum(calls) + 3 - window.residual) // window.span))  # of blocks, beyond what these calls fill
        closes = window.residual + spans * window.span
        calls += [closes - 2 - sum(calls), *[1] * 4, 80]
        finite = True
        for i, tokens in enumerate(calls):
            finite = attend(layer, tokens, padded=i == 0) and finite
            if removed := TAKEN_BACK.get(i):
                layer.remove(removed)
        layer.reorder_cache(torch.tensor([1, 0], device=device))
        closed = int(layer.state["closed"].max())
        layer.reset()
        for tokens in (window.residual + window.span - 10, 20):
            finite = attend(layer, tokens, padded=tokens != 20) and finite
        row = {"way": name, "impl": layer.spec.impl, "calls": len(calls), "closed_blocks": closed, "finite": finite}
        print(json.dumps(row), flush=True)
        if not finite:
            sys.exit(f"every_kernel: the output of {name} is not finite")


if __name__ == "__main__":
    main(sys.argv[1:])
