"""Check `qattn plan` on a GPU: one JSON row a method, for `eval/record.py`.

    python eval/record.py plan-check -- python eval/plan_check.py --layers 32 --limit 24

PyTorch's allocator gets a limit. A context of 0.95 of the planned one must then run, one of 1.06 must end with out of
memory: so the plan is within 5 and 6 % of what a run reaches. The rows have the predicted and the measured bytes of the
first too. The model has Llama-3.1-8B's shape and random weights. Fails if a method misses.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf import patch, release, report, unpatch
from qattn_hf.bench.model import LLAMA_8B, random_model
from qattn_hf.plan import WORKSPACE, Planner, Way
from qattn_hf.spelling import split_methods

METHODS = ["full", "turbo", "int8", "kivi"]
NEW_TOKENS = 8
FITS, TOO_LONG = 0.95, 1.06  # shares of the planned context


def main(arguments: list[str]) -> None:
    made = argparse.ArgumentParser(description="Check `qattn plan` on a GPU.")
    made.add_argument("--layers", type=int, default=32, help="of the model")
    made.add_argument("--limit", type=float, default=24.0, help="GiB that PyTorch may take")
    made.add_argument("--batch", type=int, default=1, help="rows")
    made.add_argument("--prefill-chunk-size", type=int, help="tokens of a call of a prompt")
    made.add_argument("--method", action="append", help=f"default: {', '.join(METHODS)}")
    options = made.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("plan_check: needs a CUDA GPU")
    device, limit = torch.device("cuda"), int(options.limit * 2**30)
    model = random_model({**LLAMA_8B, "num_hidden_layers": options.layers}, device, torch.bfloat16)
    planner = Planner(
        model.config, dtype=torch.bfloat16, prefill_chunk_size=options.prefill_chunk_size, fixed=WORKSPACE
    )
    missed = []
    for name in split_methods(options.method or METHODS):
        way = planner.way(name)
        with patched(model, way):
            run(model, 1, 300, options.prefill_chunk_size)  # compiles and loads kernels
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory)
            row = checked(model, planner, way, limit, options.batch)
            torch.cuda.set_per_process_memory_fraction(1.0)
        print(json.dumps({"check": "plan", "layers": options.layers, **row}), flush=True)
        missed += [] if row["ran"] and row["too_long_failed"] else [name]
    if missed:
        sys.exit(f"plan_check: {', '.join(missed)} missed the plan")


@contextlib.contextmanager
def patched(model: PreTrainedModel, way: Way) -> Any:
    """Context in which the model caches in this way."""
    if way.specs is None:
        yield
        return
    patch(model, way.name)
    try:
        yield
    finally:
        unpatch(model)


def checked(model: PreTrainedModel, planner: Planner, way: Way, limit: int, batch: int) -> dict[str, Any]:
    """A row: the plan, and what runs of a shorter and of a longer context said of it."""
    planned = planner.longest(limit, way, batch)
    context = int(FITS * planned)
    expected = planner.memory(way, batch, context)
    measured = run(model, batch, context, planner.prefill_chunk_size)
    longer = run(model, batch, int(TOO_LONG * planned), planner.prefill_chunk_size)
    return {
        "method": way.name,
        "batch": batch,
        "limit": limit,
        "prefill_chunk_size": None if way.specs is None else planner.prefill_chunk_size,
        "planned": planned,
        "context": context,
        "ran": measured is not None,
        "too_long": int(TOO_LONG * planned),
        "too_long_failed": longer is None,
        "predicted": {**vars(expected), "total": expected.total},
        "measured": measured,
    }


def run(model: PreTrainedModel, batch: int, context: int, chunk: int | None) -> dict[str, Any] | None:
    """Peak bytes of a `generate` that reaches `context` tokens, and how it decoded; None if memory ran out."""
    packed = hasattr(model, "_qattn")
    device, said = model.device, None
    torch.cuda.reset_peak_memory_stats(device)
    ids = torch.randint(1, LLAMA_8B["vocab_size"], (batch, context - NEW_TOKENS + 1), device=device)
    sizes = {"prefill_chunk_size": chunk} if packed and chunk is not None else {}
    with contextlib.suppress(torch.OutOfMemoryError):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **sizes
        )  # fmt: skip
        said = {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "decode": report(model).to_dict()["decode"] if packed else "eager",
        }
    if packed:
        release(model)
    gc.collect()
    torch.cuda.empty_cache()
    return said


if __name__ == "__main__":
    main(sys.argv[1:])
