"""Beam search and assisted generation compared with greedy search: `python eval/beams_speed.py` prints JSON rows.

    python eval/record.py speed-beams -- python eval/beams_speed.py

`generate` continues a prompt of one row with random weights in the shape of Llama-3.1-8B. For drafts the layers add
nothing, and the model answers each token with the next one of a fixed circle, so acceptance is known. All drafts that
follow the circle are accepted, and no drafts that go backwards. Real texts are between these cases.

`ms` is the time of a whole answer with its prompt, `first_token_ms` that of an answer of one token. `calls` counts the
model's calls after the first. `stock` is `DynamicCache` with SDPA's flash backend, or with the memory-efficient backend
if there is a mask.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from qattn_hf import report
from qattn_hf.bench.model import LLAMA_8B, TINY, random_model
from qattn_hf.bench.timing import release, synchronize
from qattn_hf.bench.ways import all_ways
from qattn_hf.recipes.recipe import find_recipes

STOCK = "stock"
WAYS = (STOCK, "turbo graph", "int8 graph", "sinkq graph", "turbo eager")
CIRCLE, DRAFTED, DRAFT_LAYERS = 96, 4, 2  # tokens of the circle and of a draft; layers of the draft model
SINGLE, WARM, LEAST, SECONDS = 5, 4, 4, 1.0  # runs of one token, untimed runs, timed ones at least, and for how long
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class Case(NamedTuple):
    """Arguments of `generate`, and which way round the circle text and draft model run, 0 for neither."""

    what: str
    inputs: dict[str, Any]
    text: int = 0
    draft: int = 0


CASES = (
    Case("greedy", {}),
    Case("4 beams", {"num_beams": 4}),
    Case("prompt lookup, all accepted", {"prompt_lookup_num_tokens": DRAFTED}, text=1),
    Case("prompt lookup, none accepted", {"prompt_lookup_num_tokens": DRAFTED}, text=-1),
    Case("draft model, all accepted", {}, text=1, draft=1),
    Case("draft model, none accepted", {}, text=1, draft=-1),
)


@torch.no_grad()
def run_round(model: PreTrainedModel, by: int) -> None:
    """Let a model answer each token of the circle with the one that lies `by` further, whatever it attends to."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    tokens = torch.arange(CIRCLE, device=model.device)
    model.lm_head.weight[1 + (tokens + by) % CIRCLE] = model.get_input_embeddings().weight[1 + tokens]


def prompt(model: PreTrainedModel, text: int, tokens: int) -> torch.Tensor:
    """Token ids `[1, tokens]`, none of them 0: at random, or round the circle."""
    if text:
        return 1 + text * torch.arange(-tokens, 0, device=model.device)[None] % CIRCLE
    return torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)


def timed(run: Callable[[int], Any], new_tokens: int, warm: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of `run(new_tokens)` and of `run(1)`."""

    def milliseconds(tokens: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        run(tokens)
        synchronize(device)
        return 1e3 * (time.perf_counter() - began)

    once = device.type != "cuda"  # the figures of a CPU only show that the script works
    first = statistics.median([milliseconds(1) for _ in range(1 if once else 1 + SINGLE)][-SINGLE:])
    for _ in range(0 if once else warm):
        milliseconds(new_tokens)
    took = [milliseconds(new_tokens)]
    while not once and (len(took) < LEAST or sum(took) < 1e3 * SECONDS):
        took.append(milliseconds(new_tokens))
    figures = {"ms": statistics.median(took), "ms_low": min(took), "ms_high": max(took), "first_token_ms": first}
    return {name: round(value, 2) for name, value in figures.items()} | {"runs": len(took)}


def measured(models: list[PreTrainedModel], case: Case, tokens: int, new_tokens: int, way: str) -> dict[str, Any]:
    """Figures of one case; one more run shows calls, and how the draft model made most of its drafts."""
    model, draft = models
    ids, prepare = prompt(model, case.text, tokens), model.prepare_inputs_for_generation
    inputs = {"do_sample": False, "attention_mask": torch.ones_like(ids), **case.inputs}
    if case.draft:
        run_round(draft, case.draft)
        inputs["assistant_model"] = draft

    def run(new: int) -> None:
        assert model.generate(ids, max_new_tokens=new, **inputs).shape[1] == tokens + new

    figures = timed(run, new_tokens, WARM if way.endswith("graph") else 1, model.device)
    ran: list[str] = []

    @functools.wraps(prepare)
    def watched(*args: Any, **kwargs: Any) -> Any:  # in place of hooks, which a replay does not run
        ran.append(decode_path(draft) if case.draft else "")
        return prepare(*args, **kwargs)

    model.__dict__["prepare_inputs_for_generation"] = watched
    try:
        run(new_tokens)
    finally:
        del model.__dict__["prepare_inputs_for_generation"]
    drafted = {"draft_decode": Counter(ran).most_common(1)[0][0]} if case.draft else {}
    return {"decode": decode_path(model), **drafted, "calls": len(ran) - 1, **figures}


def decode_path(model: PreTrainedModel) -> str:
    """How the last steps of a model ran."""
    return report(model).to_dict()["decode"] if hasattr(model, "_qattn") else "eager"


def rows(
    models: list[PreTrainedModel], ways: list[str], cases: list[Case], tokens: int, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each way and case; `models` are the model and its draft model."""
    device, layers = models[0].device, models[0].config.num_hidden_layers
    recipes = find_recipes({way.split()[0] for way in ways} - {STOCK})
    known = {name: way.prepared for name, way in all_ways(recipes, device).items()}
    for way in ways:
        prepared = known[way] if way != STOCK else lambda model: sdpa_kernel(FLASH)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(prepared(model))
            for case in cases:
                about = {"bench": "beams", "layers": layers, "batch": 1, "context": tokens, "new_tokens": new_tokens}
                yield {**about, "what": case.what, "way": way, **measured(models, case, tokens, new_tokens, way)}
        release(device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="of the model; default: %(default)s")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt; default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=33, help=f"of an answer, at most {CIRCLE}")
    parser.add_argument("--way", action="append", help=f"by default {', '.join(WAYS)}")
    parser.add_argument("--case", action="append", choices=[case.what for case in CASES], help="by default all")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes: dict[str, Any] = TINY if options.quick else {**LLAMA_8B, "num_hidden_layers": options.layers}
    dtype = torch.float32 if options.quick else torch.bfloat16
    torch.manual_seed(0)
    models = [random_model(one, device, dtype) for one in (sizes, {**sizes, "num_hidden_layers": DRAFT_LAYERS})]
    models[1].generation_config.num_assistant_tokens = DRAFTED
    models[1].generation_config.assistant_confidence_threshold = 0.0  # else a draft may end before
    for drafted in (False, True):
        if drafted:
            run_round(models[0], 1)
        cases = [one for one in CASES if bool(one.text) == drafted and (not options.case or one.what in options.case)]
        for row in rows(models, options.way or list(WAYS), cases, options.context, options.new_tokens):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
