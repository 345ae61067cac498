"""`qattn compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from qattn_hf.cli._common import (
    AtTokensOption,
    BatchOption,
    DeviceOption,
    JsonOption,
    MeasuredDtypeOption,
    ModelArgument,
    OutputOption,
    PictureOption,
    RowsOption,
    TextOption,
    TokensOption,
    WideOption,
    for_family,
    measured_in,
    methods_option,
    need_picture,
    print_rows,
    status_line,
    text_or_made,
    write_data,
)
from qattn_hf.model.loading import load, short_name

DEFAULT = ("none", "int8", "turbo", "turbo:bits=mixed", "turbo_sink_k4v2", "kivi", "turboquant")
StepsOption = Annotated[
    int, typer.Option("--steps", min=0, help="Tokens at the end of a row that are read one by one.")
]


def compare(
    model: ModelArgument = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    text: TextOption = None,
    rows: RowsOption = 4,
    tokens: TokensOption = 1536,
    steps: StepsOption = 128,
    batch: BatchOption = 4,
    at_tokens: AtTokensOption = 4096,
    dtype: MeasuredDtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
    picture: PictureOption = None,
) -> None:
    """Compare methods with full precision on a text.

    The model reads the text through each packed cache. The text needs no labels. `qattn rollout` compares texts
    that the model writes.

    Example: qattn compare MODEL --method turbo --method kivi:bits=2 --text book.txt --picture fidelity.png
    """
    from qattn_hf import compare as fidelity
    from qattn_hf.recipes.recipe import find_recipes

    need_picture(picture)
    recipes = find_recipes(method or DEFAULT)
    name, lm, tokenizer = load(model, device)
    recipes = {spelling: for_family(recipe, lm) for spelling, recipe in recipes.items()}
    own_dtype = measured_in(lm, dtype)
    reading = fidelity.read_as(
        fidelity.rows_of(tokenizer, text_or_made(text, rows * tokens), rows, tokens), steps=steps, batch=batch
    )
    with status_line() as progress:
        found = fidelity.compare(lm, recipes, reading, at_tokens=at_tokens, dtype=own_dtype, progress=progress)
    compared = [{"model": short_name(name), **row} for row in found]
    if as_json:
        print_rows(compared)
    else:
        fidelity.print_table(compared, wide)
    write_data({"rows": compared}, output)
    if picture is not None:
        fidelity.draw(compared, picture, f"{short_name(name)}: {rows} rows of {tokens} tokens")
