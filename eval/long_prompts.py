"""Time to the first token and peak memory of long prompts by the size of their calls: one JSON row each, for
`eval/record.py`.

    python eval/record.py long-prompts -- python eval/long_prompts.py --tokens 102400

The model has Llama-3.1-8B's shape and random weights. `full` is transformers' own `DynamicCache`, the prompt in one
call. Each row is the second of two runs; the first compiles and captures.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf import patch, release, unpatch
from qattn_hf.bench.generate import generate
from qattn_hf.bench.model import LLAMA_8B, TINY, kv_bytes, random_model
from qattn_hf.generate.long_prompts import PREFILL_CHUNK
from qattn_hf.recipes.spelling import split_methods

NEW_TOKENS = 8


def main(arguments: list[str]) -> None:
    made = argparse.ArgumentParser(description="Time long prompts in calls of several sizes.")
    made.add_argument("--tokens", type=int, default=102400, help="of the prompt of each row")
    made.add_argument("--batch", type=int, default=1, help="rows")
    made.add_argument("--layers", type=int, default=32, help="of the model")
    made.add_argument("--method", action="append", help="default: turbo")
    made.add_argument(
        "--chunk", type=int, action="append", help="prefill_chunk_size; default: one call, and some sizes"
    )
    made.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    options = made.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = TINY if options.tiny else {**LLAMA_8B, "num_hidden_layers": options.layers}
    model = random_model(sizes, device, torch.float32 if options.tiny else torch.bfloat16)
    ids = torch.randint(1, sizes["vocab_size"], (options.batch, options.tokens), device=device)
    weights = sum(p.nbytes for p in model.parameters())
    chunks = options.chunk or [options.tokens, PREFILL_CHUNK, PREFILL_CHUNK // 2, PREFILL_CHUNK // 4]
    for method in ["full", *split_methods(options.method or ["turbo"])]:
        for chunk in [options.tokens] if method == "full" else chunks:
            figures = measured(model, method, ids, chunk, weights)
            print(json.dumps({"bench": "long prompts", "layers": len(model.model.layers), **figures}), flush=True)


def measured(model: PreTrainedModel, method: str, ids: torch.Tensor, chunk: int, weights: int) -> dict[str, Any]:
    """A row: seconds to the first token, and peak bytes of the prompt over weights and cache."""
    if method != "full":
        patch(model, method)
    inputs = {} if method == "full" else {"prefill_chunk_size": chunk}
    for _ in range(2):
        run = None  # frees its cache before the next one
        gc.collect()
        run = generate(model, ids, NEW_TOKENS, inputs, watch=False)
    assert run is not None
    cache = kv_bytes(run.cache)
    row = {
        "method": method,
        "batch": ids.shape[0],
        "tokens": ids.shape[1],
        "prefill_chunk_size": chunk,
        "first_token_s": round(run.gaps[0], 4),
        "kv_bytes": cache,
        "prefill_peak_bytes": run.prefill_peak or None,  # which only a GPU counts
        "peak_over_weights_and_cache": run.prefill_peak - weights - cache if run.prefill_peak else None,
    }
    del run
    if method != "full":
        release(model)
        unpatch(model)
    gc.collect()
    if ids.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
