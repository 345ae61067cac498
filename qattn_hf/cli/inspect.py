"""`qattn inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qattn_hf.cli._common import DeviceOption, ModelOption, UsageError
from qattn_hf.cli.compare import TextOption
from qattn_hf.model.loading import load, short_name

METHOD = "turbo:bits=mixed,sink_num=3,sink_window=8"  # has all that the pictures show: bits by head, and a pool


def inspect(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")],
    model: ModelOption = None,
    method: Annotated[
        str, typer.Option("--method", help="Whose pool and bits are shown: a method, a recipe's name or a YAML file.")
    ] = METHOD,
    text: TextOption = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text that are read.")] = 1024,
    layer: Annotated[
        list[int] | None,
        typer.Option("--layer", min=0, help="Shown one by one; may be repeated.", show_default="first, middle, last"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file for the numbers.")] = None,
    device: DeviceOption = None,
) -> None:
    """Pictures of a model: channels of Q, K and V, gaps of values, attention sinks and the pool, bits of the heads.

    Example: qattn inspect --model PATH --text book.txt --output pictures
    """
    from qattn_hf.bench.picture import need_matplotlib

    need_matplotlib("qattn inspect")
    from qattn_hf.compare import made_text, rows_of
    from qattn_hf.fidelity.tuned import ranges
    from qattn_hf.inspect import draw_all
    from qattn_hf.inspect import inspect as look
    from qattn_hf.recipes.recipe import check_packs, find_recipe

    recipe = find_recipe(method, None, {})
    check_packs(recipe)
    name, lm, tokenizer = load(model, device)
    content = made_text(8 * tokens) if text is None else text.read_text(encoding="utf-8")
    layers = look(lm, recipe, rows_of(tokenizer, content, 1, tokens))
    packed = [found.layer for found in layers]
    shown = sorted(set(layer) if layer else {packed[0], packed[(len(packed) - 1) // 2], packed[-1]})
    if missing := [i for i in shown if i not in packed]:
        raise UsageError(f"--layer {missing[0]}: the model's packed layers are {ranges(packed)}")
    for path in draw_all(layers, output, shown, f"{short_name(name)}, {tokens} tokens, {method}"):
        print(path)
    if json_file is not None:
        data = {
            "model": short_name(name),
            "method": method,
            "tokens": tokens,
            "layers": [found.to_dict() for found in layers],
        }
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
