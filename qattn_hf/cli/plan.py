"""`qattn plan`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qattn_hf.cli._common import ModelOption, UsageError, methods_option
from qattn_hf.loading import model_source
from qattn_hf.messages import size

if TYPE_CHECKING:
    from qattn_hf.plan import Planner
    from qattn_hf.recipe import Recipe

DEFAULT = ("int8", "sage2", "turbo", "turboquant", "kivi", "sinkq")
UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def plan(
    model: ModelOption = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", help="Such as 24GiB or 80GB.", show_default="this machine's GPU")
    ] = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", min=1, help="Tokens, for the largest batch; repeat.", show_default="8192, 32768"),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Rows, for the longest context; repeat.", show_default="1"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Precision of the model; auto is the config's."),
    ] = "auto",
    chunk: Annotated[
        int | None,
        typer.Option("--prefill-chunk-size", min=1, help="Of generate, for packed caches.", show_default="its default"),
    ] = None,
    weights: Annotated[
        float | None,
        typer.Option("--weights", min=0.0, help="GiB of the weights.", show_default="counted, unless quantized"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data for programs.")] = False,
) -> None:
    """Say from a model's config alone which contexts and batches fit a GPU, for each method and for full precision.

    No weights are downloaded, and no GPU is needed. Exit code 1 if the model is refused. Example:

    qattn plan --model Qwen/Qwen3-8B --gpu-memory 24GiB --method turbo --method kivi:bits=4
    """
    import torch

    from qattn_hf.plan import Planner
    from qattn_hf.recipe import find_recipes

    memory = bytes_of(gpu_memory)
    ways: dict[str, str | Recipe] = {"full": "full", **find_recipes(method or DEFAULT)}
    planner = Planner(
        model_source(model),
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        weight_bytes=None if weights is None else int(weights * 2**30),
        prefill_chunk_size=chunk,
    )
    contexts, batches = context or [8192, 32768], batch or [1]
    rows = [row_of(planner, name, way, memory, batches, contexts) for name, way in ways.items()]
    about = conditions(planner, model or "embedded demo model", memory)
    if as_json:
        print(json.dumps({**about, "rows": rows}, indent=1))
    else:
        show(about, rows)


def conditions(planner: Planner, name: str, memory: int) -> dict[str, Any]:
    """What the rows have in common."""
    return {
        "model": name,
        "gpu_memory": memory,
        "dtype": str(planner.dtype).removeprefix("torch."),
        "weights": planner.weight_bytes,
        "prefill_chunk_size": planner.prefill_chunk_size,
        "positions": getattr(planner.config.get_text_config(decoder=True), "max_position_embeddings", None),
    }


def bytes_of(text: str | None) -> int:
    """Bytes of a size such as `24GiB`, `80GB` or `24` (GiB); without one, of this machine's GPU.

    Raises:
        UsageError: no size, or none given and no GPU here.
    """
    if text is None:
        import torch

        if not torch.cuda.is_available():
            raise UsageError("there is no GPU here: say how large it is, such as --gpu-memory 24GiB")
        return torch.cuda.get_device_properties(0).total_memory
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise UsageError(f"--gpu-memory {text}: a size such as 24GiB, 80GB or 24 (GiB)")
    return int(float(match[1]) * UNITS[match[2]])


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


def show(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no edge
    planned = [row for row in rows if "longest" in row]
    weights, memory = size(about["weights"]), size(about["gpu_memory"])
    print(f"{about['model']}, {about['dtype']}: {weights} of weights, {memory} of GPU memory")
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    first = next(iter(planned[0]["longest"]))
    names = [f"tokens, {n} row{'s' * (n > 1)}" for n in planned[0]["longest"]]
    names += [f"rows of {n}" for n in planned[0]["largest"]]
    for name in (*names, "cache", "activations"):
        table.add_column(name, justify="right")
    for row in planned:
        figures = [*row["longest"].values(), *row["largest"].values()]
        table.add_row(row["method"], *map(str, figures), *(size(row["memory"][x]) for x in ("cache", "activations")))
    console.print(table, highlight=False)
    print(f"cache and activations: at the longest context of {first} row{'s' * (first > 1)}, all of it a prompt")
    chunk = about["prefill_chunk_size"]
    calls = "as generate cuts them" if chunk is None else f"in calls of {chunk} tokens"
    print(f"prompts of packed caches {calls}; a smaller prefill_chunk_size takes less for activations")
    print("upper bounds: memory is given out as by PyTorch's caching allocator with its default settings")
    for row in rows:
        if "not_planned" in row:
            print(f"{row['method']}: {row['not_planned']}")
    if about["positions"] is not None and any(
        n > about["positions"] for row in planned for n in row["longest"].values()
    ):
        print(f"the model has {about['positions']} positions")
