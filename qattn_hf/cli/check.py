"""`qattn check`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    AtTokensOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    ModelArgument,
    OutputOption,
    RecipeOption,
    SetOption,
    WeightsOption,
    chosen_recipe,
    size_option,
    write_data,
)
from qattn_hf.cli._compile import compile_kernels
from qattn_hf.messages import size
from qattn_hf.model.loading import model_source
from qattn_hf.model.positions import beyond

if TYPE_CHECKING:
    from qattn_hf.planning.check import Check

OWN = ("layer", "bytes", "bytes_per_token", "effective_bits")


def check(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    at_tokens: AtTokensOption = 32768,
    gpu_memory: Annotated[
        int | None, size_option("--gpu-memory", "Memory of the GPU: also print the longest context")
    ] = None,
    weights: WeightsOption = None,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Compile the kernels on this GPU now, so that the first answer waits for none."),
    ] = False,
    dtype: DtypeOption = "auto",
    device: Annotated[str, typer.Option("--device", help="Device that the model will run on, cuda or cpu.")] = "cuda",
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Check from a model's config whether a method supports the model.

    The layers and the bytes of the cache are printed. No weights are downloaded. The exit code is 1 if the model is
    refused. --dtype is for --compile. Examples:

    qattn check Qwen/Qwen3-8B --method turbo:bits=2 --gpu-memory 24GiB

    qattn check Qwen/Qwen3-8B --method turbo --compile
    """
    from qattn_hf.planning.check import check as look

    chosen = chosen_recipe(method, recipe, settings, model)
    result = look(
        model_source(model), recipe=chosen, device_type=device.partition(":")[0], at_tokens=at_tokens,
        weight_bytes=weights,
    )  # fmt: skip
    name = model or "embedded demo model"
    data = {"model": name, **dataclasses.asdict(result), **contexts(result, gpu_memory)}
    compiled = None
    if compile_ and result.refused is None:
        compiled = data["compiled"] = compile_kernels(model, chosen, dtype, device)
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        show(result, name, gpu_memory)
    if compiled is not None and not as_json:
        print(compiled)
    write_data(data, output)
    if result.refused is not None:
        print(f"qattn: {name} is refused", file=sys.stderr)
        raise typer.Exit(1)


def contexts(result: Check, memory: int | None) -> dict[str, int]:
    """Tokens of the longest context, `longest` and `longest_full_precision`; empty without `--gpu-memory`.

    Raises:
        QAttnError: the bytes of the weights are unknown.
    """
    if memory is None or result.refused is not None:
        return {}
    return {"longest": result.longest(memory), "longest_full_precision": result.longest(memory, full_precision=True)}


def show(result: Check, name: str, memory: int | None) -> None:
    """Print the result as text: layers, bytes of a token, bits, weights, longest contexts."""
    print(f"{name}: {result.model_type}, {result.origin}")
    if result.refused is not None:
        print(f"refused: {result.refused}")
        for first, last, kind in runs(result.kinds):
            print(f"  layers {first}-{last}: {kind}")
        return
    print("works: patch takes it")
    print_layers(result)
    full = result.bytes_per_token_full_precision
    if full:
        print(
            f"a token takes {size(result.bytes_per_token)}, in {result.dtype} {size(full)}: "
            f"{full / result.bytes_per_token:.2f}x smaller"
        )
    if result.effective_bits is not None:
        print(
            f"bits a value: {result.effective_bits:.2f} in closed blocks, {result.effective_bits_total:.2f} with "
            f"everything at {result.at_tokens} tokens ({size(result.kv_bytes)})"
        )
    if result.layers and (warning := beyond(result.at_tokens, result.positions)) is not None:
        print(warning)
    if result.held is not None:
        print(f"memory holds {result.held[0]} tokens of one row in 8 bits, {result.held[1]} in these, the fewest")
    print(f"weights: {weights_line(result)}")
    if memory is None:
        return
    for key, tokens in contexts(result, memory).items():
        what = "in full precision" if "full" in key else "with this method"
        more = f"; the model has {result.positions} positions" if beyond(tokens, result.positions) else ""
        print(f"longest context of one row in {memory / 2**30:g} GiB {what}: {tokens} tokens{more}")
    print("activations and what else is on the GPU are not counted")


def weights_line(result: Check) -> str:
    """`14.2 GiB in bfloat16`, or why the weights are not counted."""
    if result.weight_bytes is None:
        why = "the config does not give their size"
        return f"quantized ({result.quantization}), not counted, since {why}. Fix: type --weights 16GiB"
    return size(result.weight_bytes) + (f" in {result.dtype}" if result.quantization is None else "")


def print_layers(result: Check) -> None:
    """Print one line for each run of layers with equal settings."""
    from qattn_hf.model.layer_kinds import WINDOWED

    if result.layers and all("own" in row for row in result.layers):
        print("nothing is packed: every layer stays in transformers' own cache")
    if not result.layers:
        print("nothing is packed: keys and values are in transformers' own cache")
    for _, group in itertools.groupby(result.layers, key=_alike):
        rows = list(group)
        first, last, row = rows[0]["layer"], rows[-1]["layer"], rows[0]
        if row.get("kind") == "dummy":
            print(f"  layers {first}-{last}: {row['own']}")
            continue
        if "own" in row:
            held = "a state that is not counted" if row["bytes"] is None else size(row["bytes"])
            because = f" ({row['why']})" if row.get("why") else ""
            print(f"  layers {first}-{last}: not packed, {row['own']}, {held}{because}")
            continue
        why = f" ({row['no_kernels']})" if row["no_kernels"] else ""
        if row.get("window"):
            grows = f"{WINDOWED[row['kind']]} of {row['window']}, {size(row['bytes'])}"
        else:
            grows = f"{row['effective_bits']:.2f} bits, {size(row['bytes_per_token'])} a token"
        print(
            f"  layers {first}-{last}: {row['method']}, K {row['k_format']}, V {row['v_format']}, {grows}, "
            f"computed by {row['kernels']}{why}"
        )


def _alike(row: dict[str, Any]) -> tuple[Any, ...]:
    """Key of the layers that share a line: all fields but their own, `effective_bits` as rounded for print."""
    return (*(value for key, value in row.items() if key not in OWN), round(row["effective_bits"] or 0, 2))


def runs(kinds: list[str]) -> list[tuple[int, int, str]]:
    """First and last layer, and attention type, of each run of layers of one type."""
    ranges, start = [], 0
    for kind, group in itertools.groupby(kinds):
        length = len(list(group))
        ranges.append((start, start + length - 1, kind))
        start += length
    return ranges
