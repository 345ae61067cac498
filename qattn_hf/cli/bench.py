"""`qattn bench`: how fast this machine decodes, prefills and generates, packed and stock side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import tee
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    BatchTokensOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    OutputOption,
    PictureOption,
    UsageError,
    WideOption,
    bytes_of,
    methods_option,
    need_picture,
    print_rows,
    write_data,
)
from qattn_hf.model.loading import model_source

if TYPE_CHECKING:
    import torch

    from qattn_hf.bench.layers import Heads
    from qattn_hf.bench.ways import Way
    from qattn_hf.methods import Method

bench = typer.Typer(help="Measure speed and memory of packed and stock caches.")

CPU_NOTE = "note: on a CPU the reference computes small shapes. The figures say nothing about a GPU"
DEFAULT = ("turbo", "int8", "none")
DEFAULT_OF_TILES = ("int8", "none")  # INT8 products and unquantized products
DEFAULT_OF_GENERATE = ("turbo", "int8")
DEFAULT_OF_THROUGHPUT = ("int8", "turbo", "turbo:bits=mixed", "kivi:bits=2,group_size=128,residual_length=32")
MethodsOption = Annotated[list[str] | None, methods_option(DEFAULT)]
BatchOption = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Rows. Repeatable.")]
ContextOption = Annotated[list[int] | None, typer.Option("--context", min=1, help="Cached tokens. Repeatable.")]
TokensOption = Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Prompt tokens. Repeatable.")]
PeersOption = Annotated[bool, typer.Option("--peers", help="Measure installed kernels of other libraries too.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Measure fewer and smaller points.")]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub name of a causal LM.",
        show_default="random weights in the shape of Llama-3.1-8B",
    ),
]
RandomWeightsOption = Annotated[
    bool, typer.Option("--random-weights", help="Read only the model's config, which may be a JSON file.")
]
KvMemoryOption = Annotated[
    list[str] | None,
    typer.Option("--kv-memory", parser=bytes_of, metavar="SIZE", help="Memory of the cache, as 40GiB. Repeatable."),
]
HeadsOption = Annotated[
    str | None,
    typer.Option("--heads", help="Query heads, KV heads and head dim.", show_default="32,8,128; small on a CPU"),
]


@bench.command("decode")
def decode(
    method: MethodsOption = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    heads: HeadsOption = None,
    peers: PeersOption = False,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
    picture: PictureOption = None,
) -> None:
    """Measure one layer's decode step, packed and with SDPA.

    A CUDA graph holds the whole step for one new token. SDPA is measured in bf16, with each backend.

    Example: qattn bench decode --method turbo --batch 1 --batch 16 --context 8192
    """
    from qattn_hf.bench import decode as measured
    from qattn_hf.bench.peers import installed, missing

    methods, where = chosen_methods(method), chosen_device(device)
    points = chosen_points(measured, quick, where, batch, context)
    sys.stderr.writelines(f"{line}\n" for line in (missing() if peers else ()))
    rows = measured.rows(points, methods, parse_heads(heads, where), where, installed() if peers else {})
    show(rows, as_json, output, wide, picture)


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
    wide: WideOption = False,
    picture: PictureOption = None,
) -> None:
    """Measure one layer's call for a prompt, packed and with SDPA.

    The call appends and attends; TOPS are printed. SDPA is measured in bf16, with flash and cuDNN.

    Example: qattn bench prefill --method turbo --batch 1 --tokens 16384
    """
    from qattn_hf.bench import prefill as measured

    methods, where = chosen_methods(method), chosen_device(device)
    points = chosen_points(measured, quick, where, batch, tokens)
    show(measured.rows(points, methods, parse_heads(heads, where), where), as_json, output, wide, picture)


@bench.command("generate")
def generate(
    model: ModelArgument = None,
    random_weights: RandomWeightsOption = False,
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_GENERATE)] = None,
    way: Annotated[
        list[str] | None, typer.Option("--way", help="Way such as `turbo graph` or `StaticCache`, or all. Repeatable.")
    ] = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=4, help="Tokens of each answer.")] = 32,
    quick: QuickOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
    picture: PictureOption = None,
) -> None:
    """Measure generate of a model, packed and with stock caches.

    The table has milliseconds a token, the set-up time and memory.

    Example: qattn bench generate --way "turbo graph" --way DynamicCache --context 4096
    """
    from qattn_hf.bench import generate as measured
    from qattn_hf.bench.ways import all_ways
    from qattn_hf.recipes.recipe import find_recipes

    recipes, where = find_recipes(method or DEFAULT_OF_GENERATE), chosen_device(device)
    ways = chosen_ways(way, all_ways(recipes, where))
    points = chosen_points(measured, quick, where, batch, context)
    lm = bench_model(model, quick, where, dtype, random_weights)
    show(measured.rows(points, ways, lm, where, new_tokens), as_json, output, wide, picture)


@bench.command("first-call")
def first_call(
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_GENERATE)] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Measure how long first calls wait for the compiler.

    Prompts have ten shapes. One process finds no kernel on disk, the next finds all of them.

    Example: qattn bench first-call --method turbo
    """
    from qattn_hf.bench import first_call as measured
    from qattn_hf.recipes.recipe import find_recipes

    show(measured.rows(list(find_recipes(method or DEFAULT_OF_GENERATE)), chosen_device(device)), as_json, output, wide)


@bench.command("throughput")
def throughput(
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_THROUGHPUT)] = None,
    kv_memory: KvMemoryOption = None,
    context: ContextOption = None,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Measure tokens a second with all rows that fit a memory.

    The model has random weights in the shape of Llama-3.1-8B.

    Example: qattn bench throughput --method turbo --kv-memory 40GiB --context 8192
    """
    from qattn_hf.bench import throughput as measured
    from qattn_hf.recipes.recipe import find_recipes

    recipes, where = find_recipes(method or DEFAULT_OF_THROUGHPUT), chosen_device(device)
    points = chosen_points(measured, quick, where, whole_mib(kv_memory), context)
    show(measured.rows(points, recipes, bench_model(None, quick, where), where), as_json, output, wide)


@bench.command("requests")
def requests(
    model: ModelArgument = None,
    random_weights: RandomWeightsOption = False,
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_THROUGHPUT)] = None,
    kv_memory: KvMemoryOption = None,
    longest: Annotated[
        list[int] | None, typer.Option("--longest", min=16, help="Tokens of the longest prompt. Repeatable.")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Default: 256, fewer with --quick and on a CPU."),
    ] = None,
    batch_tokens: BatchTokensOption = None,
    quick: QuickOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Measure requests of mixed lengths in continuous batching.

    Packed pages and stock pages have the same bytes.

    Example: qattn bench requests --method turbo --kv-memory 8GiB --longest 8192
    """
    from qattn_hf.bench import requests as measured
    from qattn_hf.generate.continuous.transformers_api import check_version
    from qattn_hf.recipes.recipe import find_recipes

    check_version()
    recipes, where = find_recipes(method or DEFAULT_OF_THROUGHPUT), chosen_device(device)
    (load,) = chosen_points(measured, quick, where, None, None)
    load = load._replace(requests=number or load.requests, batch_tokens=batch_tokens)
    memory = whole_mib(kv_memory) or [load.kv_mib]
    loads = [load._replace(kv_mib=mib, longest=tokens) for mib in memory for tokens in longest or [load.longest]]
    lm = bench_model(model, quick, where, dtype, random_weights)
    show(measured.rows(loads, recipes, lm, where), as_json, output, wide)


@bench.command("tiles")
def tiles(
    method: Annotated[list[str] | None, methods_option(DEFAULT_OF_TILES)] = None,
    batch: BatchOption = None,
    tokens: TokensOption = None,
    heads: HeadsOption = None,
    quick: QuickOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Find the fastest tiles of prompts on this GPU, and keep them for later processes.

    The file goes to the folder QATTN_TUNED, or ~/.cache/qattn/tuned. Send it in, and others have it too.

    Example: qattn bench tiles --heads 32,8,128
    """
    from qattn_hf.bench import tiles as measured

    where = chosen_device(device)
    points, methods = chosen_points(measured, quick, where, batch, tokens), chosen_methods(method or DEFAULT_OF_TILES)
    shapes = parse_heads(heads, where)
    if where.type != "cuda":
        raise UsageError("bench tiles measures a GPU. Fix: run it where torch finds one")
    shown, found = tee(measured.rows(points, methods, shapes, where))
    show(shown, as_json, output, wide)
    print(f"wrote {measured.keep(list(found), where)}", file=sys.stderr)


def chosen_ways(names: list[str] | None, known: dict[str, Way]) -> list[Way]:
    """The ways of `--way`; without it the default ones, with `all` every one."""
    from qattn_hf.bench.ways import default_ways

    if not names:
        return default_ways(known)
    if unknown := [name for name in names if name not in known and name != "all"]:
        raise UsageError(f"--way {unknown[0]}: here are {', '.join(known)}, or all")
    return list(known.values()) if "all" in names else [known[name] for name in names]


def whole_mib(sizes: list[Any] | None) -> list[int] | None:
    """Sizes in bytes as whole MiB."""
    if sizes and min(sizes) < 2**20:
        raise UsageError("--kv-memory: give at least 1MiB")
    return sizes and [n_bytes // 2**20 for n_bytes in sizes]


def bench_model(
    source: str | None, quick: bool, device: torch.device, dtype: str = "auto", random_weights: bool = False
) -> Any:
    """The model `source`; without, one with random weights: Llama-3.1-8B's shape, four layers of it, or a tiny one.

    Args:
        dtype: precision; `auto` is the dtype of `source` or, without `source`, bfloat16 on a GPU and float32 on a CPU.
        random_weights: whether only the config of `source` is read.
    """
    import torch
    from transformers.utils import logging

    from qattn_hf.bench import model as models

    logging.set_verbosity_error()
    precision = None if dtype == "auto" else getattr(torch, dtype)
    if source is not None:
        print(f"loading {source}", file=sys.stderr, flush=True)
        if not random_weights:
            return models.load_model(model_source(source), device, precision)
        return models.model_of_config(source if Path(source).is_file() else model_source(source), device, precision)
    if random_weights:
        raise UsageError("--random-weights needs a config. Fix: give MODEL, a folder, a JSON file or a hub name")
    if device.type != "cuda":
        return models.random_model(models.TINY, device, precision or torch.float32)
    return models.random_model(models.QUICK if quick else models.LLAMA_8B, device, precision or torch.bfloat16)


def chosen_methods(names: Sequence[str] | None) -> dict[str, Method]:
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
    """The points of a bench to measure, tiny ones on a CPU, or every pair of `first` and `second`.

    One of these that is empty is taken from the points of the bench.
    """
    points = bench.TINY if device.type != "cuda" else bench.QUICK if quick else bench.FULL
    if not first and not second:
        return list(points)
    firsts, seconds = first or dict.fromkeys(p[0] for p in points), second or dict.fromkeys(p[1] for p in points)
    return [bench.Point(a, b) for a in firsts for b in seconds]


def show(
    rows: Iterator[dict[str, Any]], as_json: bool, output: Path | None, wide: bool, picture: Path | None = None
) -> None:
    """Run a bench, then print, write and draw the rows.

    Raises:
        RuntimeError: a packed way failed. All other rows are shown first.
    """
    from qattn_hf.bench.tables import print_table, progress

    need_picture(picture)
    measured = []
    for row in rows:
        measured.append(row)
        print(progress(row), file=sys.stderr, flush=True)
        if as_json:
            print_rows([row])
    if not as_json:
        print_table(measured, wide)
    write_data({"rows": measured}, output)
    if picture is not None:
        from qattn_hf.bench.picture import draw

        draw(measured, picture)
    if failed := [row for row in measured if row["packed"] and "error" in row]:
        raise RuntimeError(f"{len(failed)} of {len(measured)} measurements failed, the first: {failed[0]['error']}")
