"""Compare eager calls with stock calls: `python eval/eager_speed.py` prints one JSON row per kind of call.

The calls are steps of one token and first calls with a prompt, with random weights in the shape of Llama-3.1-8B. Stock
calls use `DynamicCache` and SDPA's flash backend. Eager calls wait for the host, whose speed drifts by a third within
minutes. Each call is therefore timed between two calls of the other model. `ratio` is the median over these pairs,
`low` and `high` are its quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

from qattn_hf import QAttnCache, patch, release, unpatch
from qattn_hf.bench.model import LLAMA_8B, TINY, random_model
from qattn_hf.bench.timing import synchronize
from qattn_hf.recipes.spelling import split_method, split_methods

WARM_UP = 6  # pairs that are not kept: what was not compiled or planned yet is in them
Call = Callable[[], Any]


def milliseconds(call: Call, device: torch.device) -> float:
    """Of a call, until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3


def paired(ours: Call, stock: Call, pairs: int, device: torch.device) -> dict[str, float]:
    """Medians of both, and the median and the quartiles of their ratio, over `pairs` calls of each in turn."""
    times = [(milliseconds(stock, device), milliseconds(ours, device)) for _ in range(pairs + WARM_UP)][WARM_UP:]
    low, ratio, high = statistics.quantiles([mine / theirs for theirs, mine in times], n=4)
    theirs_ms, mine_ms = (statistics.median(column) for column in zip(*times, strict=True))
    figures = {"ms": mine_ms, "stock_ms": theirs_ms, "ratio": ratio, "low": low, "high": high}
    return {name: round(value, 3) for name, value in figures.items()} | {"pairs": pairs}


def calls(ours: PreTrainedModel, stock: PreTrainedModel, prompt: torch.Tensor, steps: bool) -> tuple[Call, Call]:
    """Make a call of each model: a step after `prompt`, or the prompt itself with a new cache."""

    def call(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> Any:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    if not steps:
        return lambda: call(ours, prompt, None), lambda: call(stock, prompt, None)
    mine, theirs = QAttnCache.for_model(ours), DynamicCache(config=stock.config)
    call(ours, prompt, mine)
    call(stock, prompt, theirs)
    token = prompt[:, :1]
    return lambda: call(ours, token, mine), lambda: call(stock, token, theirs)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="turbo,int8")
    parser.add_argument("--prompts", default="16,128,512", help="tokens of first calls")
    parser.add_argument("--context", type=int, default=4096, help="tokens before a step")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (TINY if options.quick else LLAMA_8B) | {"num_hidden_layers": options.layers}
    stock, ours = (random_model(shape, device, torch.bfloat16) for _ in range(2))
    kinds = [("step", options.context), *(("prompt", int(n)) for n in options.prompts.split(","))]
    for method in split_methods([options.methods]):
        name, settings = split_method(method)
        patch(ours, method=name, decode="eager", **settings)
        for what, tokens in kinds:
            prompt = torch.randint(1, shape["vocab_size"], (1, tokens), device=device)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                figures = paired(*calls(ours, stock, prompt, what == "step"), options.pairs, device)
            row = {"way": method, "what": what, "tokens": tokens, "layers": options.layers, **figures}
            print(json.dumps(row), flush=True)
        release(ours)
        unpatch(ours)


if __name__ == "__main__":
    main()
