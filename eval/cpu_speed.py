"""Compare the time of steps and prompts on a CPU with stock: `python eval/cpu_speed.py`.

It prints one JSON row per method and context.

Times are CPU time of one thread in ms, so that other processes disturb them little. Calls of stock and of the
patched model alternate, and a row has medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch

from qattn_hf import patch
from qattn_hf.model.loading import load


def timed(model: Any, ids: torch.Tensor, cache: Any = None) -> tuple[float, Any]:
    """Return the time of one call in ms, and its output."""
    start = time.process_time()
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return (time.process_time() - start) * 1e3, out


def measure(models: dict[str, Any], tokens: int, prompts: int, steps: int) -> dict[str, float]:
    """Return the median time of a prompt of `tokens` tokens and of a step after it, for each of `models`."""
    ids = torch.randint(5, 400, (1, tokens), generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {f"{kind}_{name}_ms": [] for kind in ("prompt", "step") for name in models}
    caches: dict[str, Any] = {}
    for i in range(prompts + 1):
        for name, model in models.items():
            spent, out = timed(model, ids)
            caches[name] = out.past_key_values
            if i:  # the first call warms up
                times[f"prompt_{name}_ms"].append(spent)
    for i in range(steps + 3):
        for name, model in models.items():
            spent, _ = timed(model, ids[:, i : i + 1], caches[name])
            if i >= 3:
                times[f"step_{name}_ms"].append(spent)
    return {name: round(statistics.median(spent), 2) for name, spent in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="checkpoint (default: the embedded model)")
    parser.add_argument("--methods", default="int8,turbo,kivi")
    parser.add_argument("--tokens", default="1000,2000", help="contexts")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stock = load(args.checkpoint, device="cpu").model
    for method in args.methods.split(","):
        packed = copy.deepcopy(stock)
        patch(packed, method=method)
        for tokens in map(int, args.tokens.split(",")):
            with torch.inference_mode():
                found = measure({"stock": stock, "packed": packed}, tokens, args.prompts, args.steps)
            print(
                json.dumps({"model": args.checkpoint or "embedded", "method": method, "tokens": tokens, **found}),
                flush=True,
            )


if __name__ == "__main__":
    main()
