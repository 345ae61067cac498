"""`qattn plan`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    DtypeOption,
    GpuOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    OutputOption,
    UsageError,
    WeightsOption,
    WideOption,
    methods_option,
    write_data,
)
from qattn_hf.messages import size
from qattn_hf.messages.console import print_figures
from qattn_hf.model.loading import model_source
from qattn_hf.model.positions import beyond, positions_of

if TYPE_CHECKING:
    from qattn_hf.planning.cards import Card
    from qattn_hf.planning.plan import Planner
    from qattn_hf.recipes.recipe import Recipe

DEFAULT = ("int8", "sage2", "turbo", "turboquant", "kivi", "sinkq")


def plan(
    model: ModelArgument = None,
    gpu: GpuOption = None,
    gpu_memory: MemoryOption = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context", min=1, help="Tokens: print the largest batch. Repeatable.", show_default="8192, 32768"
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Rows: print the longest context. Repeatable.", show_default="1"),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--prefill-chunk-size",
            min=1,
            help="Tokens in a call of generate that reads a prompt into a packed cache.",
            show_default="as in generate",
        ),
    ] = None,
    weights: WeightsOption = None,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Compute from a model's config which contexts and batches fit a GPU.

    The table has a line for each method and for full precision. No weights are downloaded, and no GPU is needed.
    The exit code is 1 if the model or every method is refused.

    Example: qattn plan Qwen/Qwen3-8B --gpu rtx-4090 --method turbo --method kivi:bits=4
    """
    import torch

    from qattn_hf.planning.plan import Planner
    from qattn_hf.recipes.recipe import find_recipes

    memory = memory_of(gpu) if gpu_memory is None else gpu_memory
    ways: dict[str, str | Recipe] = {"full": "full", **find_recipes(method or DEFAULT)}
    planner = Planner(
        model_source(model),
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        weight_bytes=weights,
        prefill_chunk_size=chunk,
    )
    contexts, batches = context or [8192, 32768], batch or [1]
    rows = rows_of(planner, ways, gpu, memory, batches, contexts)
    about = conditions(planner, model or "embedded demo model", memory)
    if as_json:
        print(json.dumps({**about, "rows": rows}, indent=1))
    check_planned(rows)
    if not as_json:
        show(about, rows, wide)
    write_data({**about, "rows": rows}, output)


def conditions(planner: Planner, name: str, memory: int) -> dict[str, Any]:
    """What the rows have in common."""
    return {
        "model": name,
        "gpu_memory": memory,
        "dtype": str(planner.dtype).removeprefix("torch."),
        "weights": planner.weight_bytes,
        "prefill_chunk_size": planner.prefill_chunk_size,
        "positions": positions_of(planner.config),
    }


def memory_of(card: Card | None) -> int:
    """Bytes of the card that `--gpu` names, or of this machine's GPU.

    Raises:
        UsageError: there is none.
    """
    from qattn_hf.planning.machine import gpu_memory

    if (memory := gpu_memory(card)) is None:
        raise UsageError("there is no GPU here. Fix: name one, --gpu rtx-4090, or its size, --gpu-memory 24GiB")
    return memory


def rows_of(
    planner: Planner,
    ways: dict[str, str | Recipe],
    card: Card | None,
    memory: int,
    batches: list[int],
    contexts: list[int],
) -> list[dict[str, Any]]:
    """A row of each method, with the kernels of the card that `--gpu` names or of this machine's GPU."""
    from qattn_hf.planning.machine import chip_for
    from qattn_kernels.chip import as_chip

    with as_chip(chip_for(card)):
        return [row_of(planner, name, way, memory, batches, contexts) for name, way in ways.items()]


def row_of(
    planner: Planner, name: str, method: str | Recipe, memory: int, batches: list[int], contexts: list[int]
) -> dict[str, Any]:
    """What fits with one method: `longest` context by batch, `largest` batch by context, and the parts of `memory` at
    the first of the longest contexts; or `not_planned`, why."""
    from qattn_hf.errors import UnsupportedError

    try:
        way = planner.way(method)
    except UnsupportedError as error:
        return {"method": name, "not_planned": str(error)}
    longest = {rows: planner.longest(memory, way, rows) for rows in batches}
    parts = planner.memory(way, batches[0], max(1, longest[batches[0]]))
    return {
        "method": name,
        "origin": way.origin,
        "longest": longest,
        "largest": {tokens: planner.largest(memory, way, tokens) for tokens in contexts},
        "memory": vars(parts),
    }


def check_planned(rows: list[dict[str, Any]]) -> None:
    """Refuse rows if none of them is planned.

    Raises:
        UnsupportedError: with the reason of each method.
    """
    from qattn_hf.errors import UnsupportedError

    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.get("not_planned", ""), []).append(row["method"])
    if "" not in reasons:
        listed = ". ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise UnsupportedError(f"none of the methods can be planned for this model. {listed}")


def show(about: dict[str, Any], rows: list[dict[str, Any]], wide: bool = False) -> None:
    """Print the rows as a table."""
    planned = [row for row in rows if "longest" in row]
    weights, memory = size(about["weights"]), size(about["gpu_memory"])
    print(f"{about['model']}, {about['dtype']}: {weights} of weights, {memory} of GPU memory")
    first = next(iter(planned[0]["longest"]))
    names = [f"tokens, {n} row{'s' * (n > 1)}" for n in planned[0]["longest"]]
    names += [f"rows of {n}" for n in planned[0]["largest"]]
    parts = ["cache", "activations"]
    lines = [
        [
            row["method"],
            *map(str, (*row["longest"].values(), *row["largest"].values())),
            *(size(row["memory"][part]) for part in parts),
        ]
        for row in planned
    ]
    print_figures(["method", *names, *parts], lines, ["method"], wide)
    print(f"cache and activations: at the longest context of {first} row{'s' * (first > 1)}, all of it a prompt")
    chunk = about["prefill_chunk_size"]
    calls = "as generate cuts them" if chunk is None else f"in calls of {chunk} tokens"
    print(f"prompts of packed caches {calls}; a smaller prefill_chunk_size takes less for activations")
    print("upper bounds: they assume PyTorch's caching allocator with its default settings")
    for row in rows:
        if "not_planned" in row:
            print(f"{row['method']}: {row['not_planned']}")
    asked = {n for row in planned for n in (*row["longest"].values(), *row["largest"])}
    if (warning := beyond(max(asked), about["positions"])) is not None:
        print(warning)
