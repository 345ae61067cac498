"""Plan the models that people run on a card of 24 GB: one JSON row a model and setting, for `eval/record.py`.

Nothing is run and no GPU is needed: `qattn plan`'s engine counts, from the configs in `eval/shapes/`. Bytes of a step
are those of weights and cache that a step must read. They give a lower bound of its time on a card of known bandwidth.

    python eval/record.py small-gpus -- python eval/small_gpus.py
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from qattn_hf.planning.cards import CARDS
from qattn_hf.planning.check import check, without_weights
from qattn_hf.planning.plan import Planner
from qattn_kernels.chip import as_chip

SHAPES = Path(__file__).resolve().parent / "shapes"
CARD = CARDS["rtx-3090"]
SETTINGS = ("none", "int8", "turbo", "low2")
# Weights of each model: the first form that leaves room for a cache.
MODELS = {
    "llama-3.2-1b": "bf16",
    "llama-3.2-3b": "bf16",
    "llama-3.1-8b": "bf16",
    "qwen3-1.7b": "bf16",
    "qwen3-4b": "bf16",
    "qwen3-8b": "bf16",
    "qwen3-14b": "NF4",
    "gemma-3-4b": "bf16",
    "gemma-3-12b": "NF4",
    "phi-4": "NF4",
    "gpt-oss-20b": "MXFP4",
}
NF4, MXFP4 = 4.5, 4.25  # bits of a weight with its scales: fp32 for 64 weights in bitsandbytes, 8 bits for 32
STEP_AT = 16384  # context of the step of one row
# Tokens of each row of the largest batch, and of the calls that read its prompts: whole prompts of several rows take
# more memory than their cache.
ROWS_OF, CHUNK = 8192, 1024


def bits_of(name: str, weight: torch.Tensor, form: str) -> float:
    """Return the bits of one number of a parameter. Embeddings, heads and norms stay in bf16."""
    if form == "MXFP4" and ".experts." in name and weight.dim() == 3:
        return MXFP4
    if form == "NF4" and ".layers." in name and weight.dim() == 2:
        return NF4
    return 8 * weight.itemsize


def weights_of(config: PretrainedConfig, form: str) -> dict[str, int]:
    """Return the bytes of a model's weights, and the bytes that a step reads for one token and for many tokens.

    A step reads one row of an embedding that is not the head, and for one token only the token's experts.
    """
    model = without_weights(config)
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    held = one = many = 0.0
    for name, weight in model.named_parameters():
        n_bytes = weight.numel() * bits_of(name, weight, form) / 8
        held += n_bytes
        if weight is not model.get_input_embeddings().weight or config.tie_word_embeddings:
            many += n_bytes
            one += n_bytes * (share if ".experts." in name else 1)
    return {"weight_bytes": int(held), "read_bytes": int(one), "read_bytes_many": int(many)}


def row_of(name: str, form: str, setting: str) -> dict[str, Any]:
    """Plan one model with one setting."""
    config = AutoConfig.from_pretrained(SHAPES / f"{name}.json")
    weights = weights_of(config, form)
    held = weights["weight_bytes"]
    planner = Planner(config, weight_bytes=held)
    in_chunks = Planner(config, weight_bytes=held, prefill_chunk_size=CHUNK)
    way = planner.way(setting)
    size = {n: check(config, setting, at_tokens=n, weight_bytes=held) for n in (ROWS_OF, STEP_AT)}
    return {
        "model": name,
        "weights": form,
        "setting": setting,
        **weights,
        "positions": size[STEP_AT].positions,
        "longest": planner.longest(CARD.memory_bytes, way),
        "rows": in_chunks.largest(CARD.memory_bytes, way, ROWS_OF),
        "row_bytes": size[ROWS_OF].kv_bytes,
        "step_kv_bytes": size[STEP_AT].kv_bytes,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plan models on a card of 24 GB.")
    parser.add_argument("--model", action="append", choices=MODELS, help="one model; repeatable; default: all")
    models = parser.parse_args(arguments).model or MODELS
    with as_chip(CARD.chip):
        for name, setting in product(models, SETTINGS):
            print(json.dumps(row_of(name, MODELS[name], setting)), flush=True)


if __name__ == "__main__":
    main()
