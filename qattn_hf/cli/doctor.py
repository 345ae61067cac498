"""`qattn doctor`."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    AtTokensOption,
    DtypeOption,
    GpuOption,
    JsonOption,
    MemoryOption,
    MethodOption,
    ModelArgument,
    OutputOption,
    RecipeOption,
    SetOption,
    WeightsOption,
    chosen_recipe,
    write_data,
)
from qattn_hf.cli._compile import compile_kernels
from qattn_hf.messages import size
from qattn_hf.model.loading import model_source
from qattn_hf.model.positions import beyond

if TYPE_CHECKING:
    from qattn_hf.planning.check import Check

OWN = ("layer", "bytes", "bytes_per_token", "effective_bits")


def doctor(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    gpu: GpuOption = None,
    gpu_memory: MemoryOption = None,
    at_tokens: AtTokensOption = 32768,
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
    """Say what would run, and how: the GPU, versions, and each layer of a model with its kernels and bytes.

    Only the model's config is read, and no GPU is needed. The exit code is 1 if something would not run. Paste the
    output of --json into a bug report. Examples:

    qattn doctor Qwen/Qwen3-8B --method turbo:bits=2 --gpu rtx-4090

    qattn doctor Qwen/Qwen3-8B --method turbo --compile
    """
    import torch

    from qattn_hf.planning.doctor import diagnose
    from qattn_hf.planning.machine import gpu_memory as memory_of

    chosen = chosen_recipe(method, recipe, settings, model)
    found = diagnose(
        model_source(model), chosen, card=gpu, device_type=device.partition(":")[0],
        dtype=None if dtype == "auto" else getattr(torch, dtype), at_tokens=at_tokens, weight_bytes=weights,
    )  # fmt: skip
    name = model or "embedded demo model"
    if gpu_memory is None and found.check.weight_bytes is not None:
        gpu_memory = memory_of(gpu)
    data = {"model": name, **found.to_dict(), **contexts(found.check, gpu_memory)}
    compiled = None
    if compile_ and not found.problems:
        compiled = data["compiled"] = compile_kernels(model, chosen, dtype, device)
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        show_machine(found.machine)
        show(found.check, name, gpu_memory)
        show_kernels(data["kernels"])
    if compiled is not None and not as_json:
        print(compiled)
    write_data(data, output)
    if found.problems:
        for problem in found.problems:
            print(f"qattn: {problem}", file=sys.stderr)
        raise typer.Exit(1)


def show_machine(machine: dict[str, Any]) -> None:
    """Print the GPU, what compiling needs, and versions."""
    gpu = machine["gpu"]
    if gpu is None:
        print("no GPU here: these are the kernels of an NVIDIA H200. Fix: --gpu rtx-4090 answers for another card")
    else:
        print(
            f"{gpu['name']}: compute capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['shared_kib']} KiB of shared memory a program, {size(gpu['memory'])}"
        )
        print(f"launch configurations: measured on {gpu['configured']}")
    if machine["here"]:
        print(f"launches: by {'the CUDA driver' if machine['launcher'] == 'driver' else 'Triton'}")
        print(f"C compiler: {machine['compiler'] or 'none'}; compiled kernels: {machine['cache']}")
    tested = {name: f" (tested: {first} to {last})" for name, (first, last) in machine["tested"].items()}
    for name, version in machine["versions"].items():
        print(f"{name} {version or 'is missing'}{tested.get(name, '')}")
    for sentence in machine["untested"]:
        print(f"warning: {sentence}")


def show_kernels(kernels: list[dict[str, Any]]) -> None:
    """Print the kernels of each kind of layer, with the tile of a prompt's attention."""
    for row in kernels:
        names = []
        for use in row["kernels"]:
            shown = ""
            if use["tiles"] is not None:
                tile = "{queries} queries x {bn} tokens".format(**use["tiles"])
                shown = f" ({tile}, {size(use['shared'])} of shared memory)"
            names.append(use["kernel"] + shown)
        print(f"kernels of layers {ranges(row['layers'])}: {', '.join(dict.fromkeys(names))}")


def ranges(layers: list[int]) -> str:
    """Layers as text: `0-4, 6-10`."""
    groups = itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])  # alike in a run
    found = [[layer for _, layer in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" for run in found)


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
