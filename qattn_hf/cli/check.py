"""`qattn check`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import MethodOption, RecipeOption, SetOption, chosen_recipe
from qattn_hf.loading import model_source
from qattn_hf.messages import size

if TYPE_CHECKING:
    from qattn_hf.check import Check

OWN = ("layer", "bytes", "bytes_per_token", "effective_bits")


def check(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub name of a causal LM.", show_default="embedded model")
    ] = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    at_tokens: Annotated[int, typer.Option("--at-tokens", min=1, help="Context for which bits are counted.")] = 32768,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", min=0.0, help="GiB, for the longest context that fits.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where it is going to run, cuda or cpu.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print data for programs.")] = False,
) -> None:
    """Say from a model's config alone whether a method serves it, layer by layer, and what its cache takes.

    No weights are downloaded. Exit code 1 if the model is refused. Example:

    qattn check Qwen/Qwen3-8B --method turbo:bits=2 --gpu-memory 24
    """
    from qattn_hf.check import check as look

    chosen = chosen_recipe(method, recipe, settings, model)
    found = look(model_source(model), recipe=chosen, device_type=device.partition(":")[0], at_tokens=at_tokens)
    name = model or "embedded demo model"
    if as_json:
        print(json.dumps({"model": name, **dataclasses.asdict(found), **contexts(found, gpu_memory)}, indent=1))
    else:
        show(found, name, gpu_memory)
    if found.refused is not None:
        print(f"qattn: {name} is refused", file=sys.stderr)
        raise typer.Exit(1)


def contexts(found: Check, gpu_memory: float | None) -> dict[str, int]:
    """The longest contexts in so many GiB."""
    if gpu_memory is None or found.refused is not None:
        return {}
    memory = int(gpu_memory * 2**30)
    return {"longest": found.longest(memory), "longest_full_precision": found.longest(memory, full_precision=True)}


def show(found: Check, name: str, gpu_memory: float | None) -> None:
    """What was found, for people."""
    print(f"{name}: {found.model_type}, {found.origin}")
    if found.refused is not None:
        print(f"refused: {found.refused}")
        for first, last, kind in runs(found.kinds):
            print(f"  layers {first}-{last}: {kind}")
        return
    print("works: patch takes it")
    print_layers(found)
    full = found.bytes_per_token_full_precision
    print(
        f"a token takes {size(found.bytes_per_token)}, in {found.dtype} {size(full)}: "
        f"{full / found.bytes_per_token:.2f}x smaller"
    )
    if found.effective_bits_total is not None:
        print(
            f"bits a value: {found.effective_bits:.2f} in closed blocks, {found.effective_bits_total:.2f} with "
            f"everything at {found.at_tokens} tokens ({size(found.kv_bytes)})"
        )
    print(f"weights: {size(found.weight_bytes)} in {found.dtype}; quantized weights take less")
    for key, tokens in contexts(found, gpu_memory).items():
        what = "in full precision" if "full" in key else "with this method"
        beyond = found.positions is not None and tokens > found.positions
        more = f"; the model has {found.positions} positions" if beyond else ""
        print(f"longest context of one row in {gpu_memory:g} GiB {what}: {tokens} tokens{more}")
    if gpu_memory is not None:
        print("activations and what else is on the GPU are not counted")


def print_layers(found: Check) -> None:
    """One line a run of layers that are alike."""
    if not found.layers:
        print("nothing is packed: keys and values stand in transformers' own cache")
    for _, group in itertools.groupby(found.layers, key=_alike):
        rows = list(group)
        first, last, row = rows[0]["layer"], rows[-1]["layer"], rows[0]
        why = f" ({row['no_kernels']})" if row["no_kernels"] else ""
        print(
            f"  layers {first}-{last}: {row['method']}, K {row['k_format']}, V {row['v_format']}, "
            f"{row['effective_bits']:.2f} bits, {size(row['bytes_per_token'])} a token, "
            f"computed by {row['kernels']}{why}"
        )


def _alike(row: dict[str, Any]) -> tuple[Any, ...]:
    """What layers of one line share; `effective_bits` to the figures that are shown."""
    return (*(value for key, value in row.items() if key not in OWN), round(row["effective_bits"], 2))


def runs(kinds: list[str]) -> list[tuple[int, int, str]]:
    """First and last layer of each run of layers of one kind."""
    found, start = [], 0
    for kind, group in itertools.groupby(kinds):
        length = len(list(group))
        found.append((start, start + length - 1, kind))
        start += length
    return found
