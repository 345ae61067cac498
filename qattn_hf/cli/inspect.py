"""`qattn inspect`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    TextOption,
    UsageError,
    known_methods,
    text_or_made,
    write_data,
)
from qattn_hf.model.loading import load, short_name

METHOD = "turbo:bits=mixed,sink_num=3,sink_window=8"  # the pictures show bits of each head, and a pool of sinks
ShownOption = Annotated[
    str,
    typer.Option(
        "--method", help="Method, recipe or YAML file whose sinks and bits are shown.", callback=known_methods
    ),
]


def inspect(
    model: ModelArgument = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", help="Folder for the pictures. Needs matplotlib.")
    ] = None,
    method: ShownOption = METHOD,
    text: TextOption = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to read.")] = 1024,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            "--layer", min=0, help="Layer to draw separately. Repeatable.", show_default="first, middle, last"
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Draw the ranges of a model's channels, its attention sinks, and the bits of its heads.

    The pictures show queries, keys and values. --pictures FOLDER draws them. --json and --output give their numbers.

    Example: qattn inspect MODEL --text book.txt --pictures FOLDER
    """
    if pictures is None and output is None and not as_json:
        raise UsageError("nothing is asked for. Fix: type --pictures FOLDER, --output FILE.json or --json")
    from qattn_hf.bench.picture import need_matplotlib

    if pictures is not None:
        need_matplotlib("--pictures")
    from qattn_hf.compare import rows_of
    from qattn_hf.fidelity.tuned import ranges
    from qattn_hf.inspect import draw_all
    from qattn_hf.inspect import inspect as look
    from qattn_hf.recipes.recipe import check_packs, find_recipe

    recipe = find_recipe(method, None, {})
    check_packs(recipe)
    name, lm, tokenizer = load(model, device, dtype)
    layers = look(lm, recipe, rows_of(tokenizer, text_or_made(text, tokens), 1, tokens))
    packed = [found.layer for found in layers]
    shown = sorted(set(layer) if layer else {packed[0], packed[(len(packed) - 1) // 2], packed[-1]})
    if missing := [i for i in shown if i not in packed]:
        raise UsageError(f"--layer {missing[0]}: the model's packed layers are {ranges(packed)}")
    if pictures is not None:
        for path in draw_all(layers, pictures, shown, f"{short_name(name)}, {tokens} tokens, {method}"):
            print(path, file=sys.stderr if as_json else sys.stdout)
    data = {"model": short_name(name), "method": method, "tokens": tokens}
    data |= {"layers": [found.to_dict() for found in layers]}
    if as_json:
        print(json.dumps(data, indent=1))
    write_data(data, output)
