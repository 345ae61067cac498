"""`qattn bench`: how fast this machine decodes, prefills and generates, packed and stock side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import DeviceOption, UsageError, methods_option, write_rows
from qattn_hf.model.loading import model_source

if TYPE_CHECKING:
    import torch

    from qattn_hf.bench.layers import Heads
    from qattn_hf.bench.ways import Way
    from qattn_hf.methods import Method

bench = typer.Typer(help="Measure speed and memory on this machine, packed and stock caches side by side.")

CPU_NOTE = (
    "note: on a CPU the reference computes small shapes; this shows that the command works, the figures are not "
    "those of a GPU"
)
DEFAULT = ("turbo", "int8", "none")
DEFAULT_OF_GENERATE = ("turbo", "int8")
DEFAULT_OF_THROUGHPUT = ("int8", "turbo", "turbo:bits=mixed", "kivi:bits=2,group_size=128,residual_length=32")
MethodsOption = Annotated[list[str] | None, methods_option(DEFAULT)]
BatchOption = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Rows; may be repeated.")]
ContextOption = Annotated[list[int] | None, typer.Option("--context", min=1, help="Cached tokens; may be repeated.")]
TokensOption = Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Prompt tokens; may be repeated.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer and smaller points.")]
HeadsOption = Annotated[
    str | None,
    typer.Option("--heads", help="Query heads, KV heads, head dim.", show_default="32,8,128; small on a CPU"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON row a measurement in place of the table.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="JSON file for rows, GPU and versions.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="PNG file for a picture; needs matplotlib.")]


@bench.command("decode")
def decode(
    method: MethodsOption = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    heads: HeadsOption = None,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    plot: PlotOption = None,
) -> None:
    """One layer's whole decode step for one new token, and every SDPA backend in bf16, inside one CUDA graph.

    Example: qattn bench decode --method turbo --batch 1 --batch 16 --context 8192
    """
    from qattn_hf.bench import decode as measured

    methods, where = chosen_methods(method), chosen_device(device)
    points = chosen_points(measured, quick, where, batch, context)
    show(measured.rows(points, methods, parse_heads(heads, where), where), as_json, output, plot)


@bench.command("prefill")
def prefill(
    method: MethodsOption = None,
    batch: BatchOption = None,
    tokens: TokensOption = None,
    heads: HeadsOption = None,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    plot: PlotOption = None,
) -> None:
    """One layer's whole call for a prompt, append and attention, and bf16 SDPA with flash and cuDNN, in TOPS.

    Example: qattn bench prefill --method turbo --batch 1 --tokens 16384
    """
    from qattn_hf.bench import prefill as measured

    methods, where = chosen_methods(method), chosen_device(device)
    points = chosen_points(measured, quick, where, batch, tokens)
    show(measured.rows(points, methods, parse_heads(heads, where), where), as_json, output, plot)


@bench.command("generate")
def generate(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub name.", show_default="Llama-3.1-8B's shape, random weights"),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Of --model read the config alone, which may be a JSON file.")
    ] = False,
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_GENERATE)] = None,
    way: Annotated[
        list[str] | None, typer.Option("--way", help="Such as `turbo graph` or `StaticCache`; may be repeated; or all.")
    ] = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=4, help="Tokens of each answer.")] = 32,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    plot: PlotOption = None,
) -> None:
    """`generate` of a whole model, packed and with transformers' own caches: time of a token, set-up and memory.

    Example: qattn bench generate --way "turbo graph" --way "DynamicCache, flash" --context 4096
    """
    from qattn_hf.bench import generate as measured
    from qattn_hf.bench.ways import all_ways
    from qattn_hf.recipes.recipe import find_recipes

    recipes, where = find_recipes(method or DEFAULT_OF_GENERATE), chosen_device(device)
    ways = chosen_ways(way, all_ways(recipes, where))
    points, lm = chosen_points(measured, quick, where, batch, context), bench_model(model, quick, where, random_weights)
    show(measured.rows(points, ways, lm, where, new_tokens), as_json, output, plot)


@bench.command("first-call")
def first_call(
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_GENERATE)] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Seconds that a process waits for the compiler over prompts of ten shapes, with no kernel on disk and with all.

    Example: qattn bench first-call --method turbo
    """
    from qattn_hf.bench import first_call as measured
    from qattn_hf.recipes.recipe import find_recipes

    recipes = find_recipes(method or DEFAULT_OF_GENERATE)
    show(measured.rows(list(recipes), chosen_device(device)), as_json, output, None)


@bench.command("throughput")
def throughput(
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_THROUGHPUT)] = None,
    kv_mib: Annotated[
        list[int] | None,
        typer.Option("--kv-mib", min=1, help="MiB of keys and values that rows share; may be repeated."),
    ] = None,
    context: ContextOption = None,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Tokens a second of a model of Llama-3.1-8B's shape with as many rows as fit the same memory, packed and stock.

    Example: qattn bench throughput --method turbo --kv-mib 40960 --context 8192
    """
    from qattn_hf.bench import throughput as measured
    from qattn_hf.recipes.recipe import find_recipes

    recipes, where = find_recipes(method or DEFAULT_OF_THROUGHPUT), chosen_device(device)
    points = chosen_points(measured, quick, where, kv_mib, context)
    show(measured.rows(points, recipes, bench_model(None, quick, where), where), as_json, output, None)


@bench.command("requests")
def requests(
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_THROUGHPUT)] = None,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """256 requests of mixed lengths by continuous batching, over packed pages and transformers' own of the same bytes.

    Example: qattn bench requests --method turbo
    """
    from qattn_hf.bench import requests as measured
    from qattn_hf.recipes.recipe import find_recipes

    recipes, where = find_recipes(method or DEFAULT_OF_THROUGHPUT), chosen_device(device)
    points = chosen_points(measured, quick, where, None, None)
    show(measured.rows(points, recipes, bench_model(None, quick, where), where), as_json, output, None)


def chosen_ways(names: list[str] | None, known: dict[str, Way]) -> list[Way]:
    """The ways of `--way`; without it the default ones, with `all` every one."""
    from qattn_hf.bench.ways import default_ways

    if not names:
        return default_ways(known)
    if unknown := [name for name in names if name not in known and name != "all"]:
        raise UsageError(f"--way {unknown[0]}: here are {', '.join(known)}, or all")
    return list(known.values()) if "all" in names else [known[name] for name in names]


def bench_model(source: str | None, quick: bool, device: torch.device, random_weights: bool = False) -> Any:
    """The model of `--model`, else one with random weights: Llama-3.1-8B's shape, four layers of it, or a tiny one.

    Args:
        random_weights: whether `source` gives the config alone.
    """
    import torch
    from transformers.utils import logging

    from qattn_hf.bench import model as models

    logging.set_verbosity_error()
    if source is not None:
        print(f"loading {source}", file=sys.stderr, flush=True)
        if not random_weights:
            return models.load_model(model_source(source), device)
        return models.model_of_config(source if Path(source).is_file() else model_source(source), device)
    if random_weights:
        raise UsageError("--random-weights: name a config with --model, a folder, a JSON file or a hub name")
    if device.type != "cuda":
        return models.random_model(models.TINY, device, torch.float32)
    return models.random_model(models.QUICK if quick else models.LLAMA_8B, device, torch.bfloat16)


def chosen_methods(names: list[str] | None) -> dict[str, Method]:
    """Settings of one layer by the method's spelling: `["turbo:bits=2"]` -> `{"turbo:bits=2": settings}`."""
    from qattn_hf.recipes.recipe import find_recipes

    recipes = find_recipes(names or DEFAULT)
    if several := [name for name, recipe in recipes.items() if recipe.choices]:
        raise UsageError(f"--method {several[0]}: a bench measures the settings of one layer; leave out layers")
    return {name: recipe.settings for name, recipe in recipes.items()}


def chosen_device(name: str | None) -> torch.device:
    """The device of `--device`, else a GPU if there is one; a CPU gets a note on stderr."""
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: no GPU that this torch can use")
    if device.type != "cuda":
        print(CPU_NOTE, file=sys.stderr)
    return device


def parse_heads(text: str | None, device: torch.device) -> Heads:
    """Layer shape from `32,8,128` (query heads, KV heads, head dim); bf16 on a GPU, fp32 on a CPU."""
    import torch

    from qattn_hf.bench.layers import Heads

    text = text or ("32,8,128" if device.type == "cuda" else "4,2,32")
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) != 3 or min(numbers) < 1 or numbers[0] % numbers[1]:
        raise UsageError(f"--heads {text}: give query heads, KV heads and head dim, such as 32,8,128")
    query, kv, dim = numbers
    return Heads(query, kv, dim, torch.bfloat16 if device.type == "cuda" else torch.float32)


def chosen_points(
    bench: ModuleType, quick: bool, device: torch.device, first: list[int] | None, second: list[int] | None
) -> list[Any]:
    """The points of a bench to measure, by its options; tiny ones on a CPU."""
    points = bench.TINY if device.type != "cuda" else bench.QUICK if quick else bench.FULL
    return [bench.Point(*point) for point in crossed(points, first, second)]


def crossed(points: list[Any], first: list[int] | None, second: list[int] | None) -> list[Any]:
    """`points`, or every pair of `first` and `second`; one that is empty is taken from `points`."""
    if not first and not second:
        return points
    first = first or list(dict.fromkeys(p[0] for p in points))
    second = second or list(dict.fromkeys(p[1] for p in points))
    return [(a, b) for a in first for b in second]


def show(rows: Iterator[dict[str, Any]], as_json: bool, output: Path | None, plot: Path | None) -> None:
    """Run a bench; print, write and plot its rows.

    Raises:
        RuntimeError: a packed way failed; all other rows were shown before.
    """
    if plot is not None:
        from qattn_hf.bench.picture import draw, need_matplotlib

        need_matplotlib()  # before the work, not after it
    measured = []
    for row in rows:
        measured.append(row)
        print(progress(row), file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps(row), flush=True)
    if not as_json:
        from qattn_hf.bench.tables import print_table

        print_table(measured)
    if output is not None:
        write_rows(measured, output)
    if plot is not None:
        draw(measured, plot)
    if failed := [row for row in measured if row["packed"] and "error" in row]:
        raise RuntimeError(f"{len(failed)} of {len(measured)} measurements failed, the first: {failed[0]['error']}")


def progress(row: dict[str, Any]) -> str:
    """One line about a measured row, for stderr."""
    keys = "kv_mib", "batch", "context", "tokens", "cache", "kernels"
    place = ", ".join(f"{key} {row[key]}" for key in keys if key in row)
    place += f", room for {row['context'] * row['room']}" if row.get("room", 1) > 1 else ""
    if "error" in row:
        return f"{place}: {row['way']}: {row['error']}"
    figures = {"ms": "ms", "tops": "TOPS", "gb_per_s": "GB/s", "ms_per_token": "ms a token", "step_ms": "ms a step"}
    figures |= {"wait_s": "s of waiting", "tokens_per_s": "tokens a second"}
    values = ", ".join(f"{row[key]:.4g} {unit}" for key, unit in figures.items() if row.get(key) is not None)
    ran = ", ".join(str(row[key]) for key in ("impl", "decode") if row.get(key))
    return f"{place}: {row['way']}: {values}" + (f" ({ran})" if ran else "")
