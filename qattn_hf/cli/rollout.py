"""`qattn rollout`."""

from __future__ import annotations

from typing import Annotated

import typer

from qattn_hf.cli._common import (
    BatchOption,
    DeviceOption,
    JsonOption,
    MeasuredDtypeOption,
    ModelArgument,
    OutputOption,
    RowsOption,
    TextOption,
    UsageError,
    WideOption,
    for_family,
    measured_in,
    methods_option,
    print_rows,
    status_line,
    text_or_made,
    write_data,
)
from qattn_hf.cli.compare import DEFAULT
from qattn_hf.model.loading import load, short_name

PromptOption = Annotated[int, typer.Option("--tokens", min=8, help="Tokens of a row, which is the prompt.")]
NewTokensOption = Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens that the model writes after a row.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 is greedy. Above 0, tokens are sampled with a fixed seed.")
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", help="Folder or hub name of a draft model. Counts how many of its tokens are accepted."),
]
DraftLayersOption = Annotated[
    int | None,
    typer.Option("--draft-layers", min=1, help="Draft with this many of the model's first layers (early exit)."),
]


def rollout(
    model: ModelArgument = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    text: TextOption = None,
    rows: RowsOption = 4,
    tokens: PromptOption = 1536,
    new_tokens: NewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    draft: DraftOption = None,
    draft_layers: DraftLayersOption = None,
    batch: BatchOption = 4,
    dtype: MeasuredDtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Compare the texts that a model writes through each cache.

    Full precision judges each text. With --draft or --draft-layers, a draft model guesses the tokens (assisted
    generation), and the share of accepted tokens is counted.

    Example: qattn rollout MODEL --text book.txt --new-tokens 512 --method turbo --method kivi:bits=2
    """
    from qattn_hf import compare as fidelity
    from qattn_hf.recipes.recipe import find_recipes

    if draft is not None and draft_layers is not None:
        raise UsageError("--draft and --draft-layers both name a draft model. Fix: leave one out")
    drafted = draft is not None or draft_layers is not None
    if drafted and temperature:
        raise UsageError("drafts are guesses of greedy tokens. Fix: leave --temperature out")
    recipes = find_recipes(method or DEFAULT)
    name, lm, tokenizer = load(model, device)
    recipes = {spelling: for_family(recipe, lm) for spelling, recipe in recipes.items()}
    own_dtype = measured_in(lm, dtype)
    ids = fidelity.rows_of(tokenizer, text_or_made(text, rows * tokens), rows, tokens)
    with status_line() as progress:
        if drafted:
            drafts = fidelity.first_layers(lm, draft_layers) if draft_layers else load(draft, device).model.to(lm.dtype)
            found = fidelity.compare_drafts(lm, drafts, recipes, ids, new_tokens, batch=batch, progress=progress)
        else:
            found = fidelity.compare_rollouts(
                lm, recipes, ids, new_tokens, fidelity.Choice(temperature),
                batch=batch, dtype=own_dtype, progress=progress,
            )  # fmt: skip
    written = [{"model": short_name(name), **row} for row in found]
    if as_json:
        print_rows(written)
    elif drafted:
        fidelity.print_drafts(written, wide)
    else:
        fidelity.print_rollouts(written, wide)
    write_data({"rows": written}, output)
