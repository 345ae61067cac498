"""Which causal model types of transformers can be patched: `python eval/models.py [TYPE ...]` prints one JSON row each.

Each type is built from its config, made small, with random weights. If `patch` accepts it, greedy tokens of a padded
batch with `none` in the reference must equal the stock model's, past the window and past a block. `int8` must generate
as well. If windows stay unpacked, `none` must give the same tokens with packed windows. Two requests of different
lengths in continuous batching must get the tokens that `generate` gives each alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from small_configs import small_config
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qattn_hf import patch, unpatch
from qattn_hf.errors import QAttnError
from qattn_hf.model import _compat

PROMPT, PADDING, STEPS = 30, 11, 66
BATCHED = 40  # tokens of an answer to a request: past a block
MEMORY = 8 * 2**30  # bytes of address space beyond which a type is not small
GREEDY = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}


def prompts() -> dict[str, torch.Tensor]:
    """Two rows of tokens, the second with padding on its left."""
    ids = torch.randint(3, 90, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :PADDING], ids[1, :PADDING] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def build(model_type: str, of_kind: int = 2, **changes: Any) -> PreTrainedModel:
    """A small random model of this type, in fp32; arguments as of `small_config`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type, of_kind, **changes), dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() < 2 or not weight.std() > 0:  # biases, sinks, and what transformers leaves as it was allocated
            torch.nn.init.normal_(weight, std=0.1)
    return model


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"[:300]


def measure(model_type: str) -> dict[str, Any]:
    """Return the row of one type. Its `result` is one of these:

    `runs`; `part` if only some layers are packed; `own` if no layer is; `refused`; `error`; `stock` if the stock model
    could not be built or does not generate.
    """
    row: dict[str, Any] = {"model_type": model_type, "result": "stock"}
    try:
        model = build(model_type)
        text = model.config.get_text_config(decoder=True)
        row["class"] = type(model).__name__
        want = None if model.config.is_encoder_decoder else model.generate(**prompts(), **GREEDY)
    except Exception as error:  # whatever it is, it is a row
        want, row["reason"] = None, first_line(error)
        if "class" not in row:
            return row
    if hasattr(text, "num_hidden_layers"):
        row["layers"] = list(dict.fromkeys(layer.kind for layer in _compat.layer_types(text)))
    return row | compared(model, want)


def compared(model: PreTrainedModel, want: torch.Tensor | None) -> dict[str, Any]:
    """What `patch` makes of a model whose stock tokens are `want` (None: it has none)."""
    try:
        patch(model, "none", impl="reference", family=False)
        specs, packed = model._qattn.specs, model._qattn.packed
        holding = [spec for spec in specs if getattr(spec, "reads", None) is None]  # the others hold nothing
        if want is None:
            return {"result": "stock"}
        got = model.generate(**prompts(), **GREEDY)
        if not torch.equal(got, want):
            at = int((got != want).any(0).nonzero()[0]) - PROMPT
            return {"result": "error", "reason": f"other tokens than stock from step {at}"}
        patch(model, "int8", impl="reference", family=False)
        model.generate(**prompts(), **GREEDY)
        unpatch(model)
        if not torch.equal(model.generate(**prompts(), **GREEDY), want):
            return {"result": "error", "reason": "other tokens after unpatch"}
        kind = "runs" if len(packed) == len(holding) else "part" if packed else "own"
        row = {"result": kind, "packed": len(packed), "of": len(holding), **packed_windows(model, specs, want)}
        return row | {"batching": batching(model)}
    except QAttnError as error:
        return {"result": "refused", "reason": str(error).splitlines()[0]}
    except Exception as error:
        return {"result": "error", "reason": first_line(error)}


def packed_windows(model: PreTrainedModel, specs: list[Any], want: torch.Tensor) -> dict[str, str]:
    """Field `windows` of a row, where a model has some: `packed`, or why `sliding="packed"` does not serve them."""
    if not any(getattr(spec, "why", None) for spec in specs):
        return {}
    try:
        patch(model, "none", impl="reference", family=False, sliding="packed")
        same = torch.equal(model.generate(**prompts(), **GREEDY), want)
    except QAttnError as error:
        return {"windows": str(error).splitlines()[0]}
    unpatch(model)
    return {"windows": "packed" if same else "other tokens than stock"}


def batching(model: PreTrainedModel) -> str:
    """Field `batching` of a row: `runs`, or why continuous batching does not serve the model."""
    from transformers import ContinuousBatchingConfig

    given = prompts()
    rows = zip(given["input_ids"], given["attention_mask"], strict=True)
    requests = [ids[mask.bool()].tolist() for ids, mask in rows]
    model.generation_config.eos_token_id = None
    fixed = {"max_new_tokens": BATCHED, "do_sample": False, "pad_token_id": 0}
    try:
        patch(model, "none", impl="reference", family=False)
        want = [model.generate(torch.tensor([ids]), **fixed)[0, len(ids) :].tolist() for ids in requests]
        pool = ContinuousBatchingConfig(num_blocks=16, page_size=64, max_batch_tokens=128)
        answers = model.generate_batch(requests, GenerationConfig(**fixed, eos_token_id=-1), pool).values()
    except QAttnError as error:
        return str(error).splitlines()[0]
    except Exception as error:
        return first_line(error)
    failed = next((one.error for one in answers if one.error is not None), None)
    if failed is not None:
        return failed.removeprefix("the forward of this request failed: ").removeprefix("UnsupportedError: ")
    return "runs" if [one.generated_tokens for one in answers] == want else "other tokens than generate"


def _child(model_type: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pipe.send(measure(model_type))


def measured_apart(model_type: str, seconds: float) -> dict[str, Any]:
    """Run `measure` in a separate process. A crash, or more than `seconds`, is an error."""
    fork = multiprocessing.get_context("fork")  # everything is imported already
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(model_type, theirs))
    began = time.perf_counter()
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = ours.recv() if ours.poll(seconds) else {"result": "error", "reason": f"over {seconds} s"}
    except EOFError:
        row = {"result": "error", "reason": "its process ended"}
    process.kill()
    process.join()
    return {"model_type": model_type, **row, "seconds": round(time.perf_counter() - began, 1)}


def sweep(types: list[str], jobs: int, seconds: float) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda name: measured_apart(name, seconds), types)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print one JSON row for each causal type of transformers.")
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument("--seconds", type=float, default=600, help="time for one type")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for row in sweep(options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), options.jobs, options.seconds):
        counts[row["result"]] = counts.get(row["result"], 0) + 1
        print(json.dumps(row), flush=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())), file=sys.stderr)


if __name__ == "__main__":
    main()
