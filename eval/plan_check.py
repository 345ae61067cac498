"""Check `qattn plan` on a GPU: one JSON row a method, for `eval/record.py`.

    python eval/record.py plan-check -- python eval/plan_check.py --layers 32 --limit 24

PyTorch's allocator gets a limit. A context of 0.95 times the planned one must run, and one of 1.05 times must run out
of memory, so the plan is right within 5 %. For these and other shares a row has the predicted and the measured peaks:
bytes of tensors (allocated) and bytes taken from CUDA (reserved), which show the cause of a miss. The model has random
weights in the shape of Llama-3.1-8B. Fails if a method misses.
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
from qattn_hf.planning.plan import WORKSPACE, Planner, Way
from qattn_hf.recipes.spelling import split_methods

METHODS = ["full", "turbo", "int8", "kivi"]
NEW_TOKENS = 8
SHARES = (0.5, 0.8, 0.95, 1.0, 1.05)  # of the planned context
FITS, TOO_LONG = 0.95, 1.05  # up to here each must run, from here on none


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
        missed += [] if row["within"] else [name]
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
    """Return a row with the plan and the results of shorter and longer contexts."""
    planned = planner.longest(limit, way, batch)
    runs: list[dict[str, Any]] = []
    for share in SHARES:
        context = int(share * planned)
        expected = planner.memory(way, batch, context)
        predicted = {
            "fits": planner.fits(limit, way, batch, context),
            "allocated": expected.weights + expected.cache + expected.activations,
            "reserved": expected.total,  # where nothing limits it; at the limit free segments go back
            "cache": expected.cache,
        }
        measured = run(model, batch, context, planner.prefill_chunk_size)
        runs.append({"share": share, "context": context, "predicted": predicted, "measured": measured})
    ran = {one["share"]: one["measured"]["ran"] for one in runs}
    return {
        "method": way.name,
        "batch": batch,
        "limit": limit,
        "prefill_chunk_size": None if way.specs is None else planner.prefill_chunk_size,
        "planned": planned,
        "within": all(ran[x] for x in SHARES if x <= FITS) and not any(ran[x] for x in SHARES if x >= TOO_LONG),
        "runs": runs,
    }


def run(model: PreTrainedModel, batch: int, context: int, chunk: int | None) -> dict[str, Any]:
    """Peak bytes of a `generate` that reaches `context` tokens; how it decoded, or what did not fit any more."""
    packed = hasattr(model, "_qattn")
    device = model.device
    said: dict[str, Any] = {"ran": True}
    torch.cuda.reset_peak_memory_stats(device)
    ids = torch.randint(1, LLAMA_8B["vocab_size"], (batch, context - NEW_TOKENS + 1), device=device)
    sizes = {"prefill_chunk_size": chunk} if packed and chunk is not None else {}
    try:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **sizes
        )  # fmt: skip
        said["decode"] = report(model).to_dict()["decode"] if packed else "eager"
    except torch.OutOfMemoryError as error:
        said |= {"ran": False, "error": str(error)}
    said["allocated"] = torch.cuda.max_memory_allocated(device)
    said["reserved"] = torch.cuda.max_memory_reserved(device)
    if packed:
        release(model)
    gc.collect()
    torch.cuda.empty_cache()
    return said


if __name__ == "__main__":
    main(sys.argv[1:])
