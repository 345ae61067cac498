"""`qattn compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qattn_hf.cli._common import DeviceOption, ModelOption, for_family, methods_option, write_rows
from qattn_hf.model.loading import load, short_name

DEFAULT = ("none", "int8", "turbo", "turbo:bits=mixed", "turbo_sink_k4v2", "kivi", "turboquant")

TextOption = Annotated[
    Path | None, typer.Option("--text", help="File to read.", show_default="generated sums and lists")
]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Rows of the text.")]
TokensOption = Annotated[int, typer.Option("--tokens", min=8, help="Tokens of a row; scored after a third of it.")]
StepsOption = Annotated[int, typer.Option("--steps", min=0, help="Last tokens of a row that come one by one.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Rows read at once.")]
RolloutOption = Annotated[
    int, typer.Option("--rollout", min=0, help="Tokens that each cache writes after each row; 0: the rows are read.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="Of --rollout: 0 is greedy, else sampled by a fixed seed.")
]
DraftOption = Annotated[
    str | None, typer.Option("--draft", help="Folder or hub name of a draft model: how much of it is accepted.")
]
AtTokensOption = Annotated[int, typer.Option("--at-tokens", min=1, help="Context for which bits are counted.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Precision to measure in; float32 shows the smallest damage, auto is the model's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON row a method in place of the table.")]
WideOption = Annotated[bool, typer.Option("--wide", help="Show all columns: perplexity, errors of attention.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="JSON file for rows, device and versions.")]
PictureOption = Annotated[Path | None, typer.Option("--picture", help="PNG file; needs matplotlib.")]


def compare(
    model: ModelOption = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    text: TextOption = None,
    rows: RowsOption = 4,
    tokens: TokensOption = 1536,
    steps: StepsOption = 128,
    batch: BatchOption = 4,
    rollout: RolloutOption = 0,
    temperature: TemperatureOption = 0.0,
    draft: DraftOption = None,
    at_tokens: AtTokensOption = 4096,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
    wide: WideOption = False,
    output: OutputOption = None,
    picture: PictureOption = None,
    device: DeviceOption = None,
) -> None:
    """Compare methods with full precision on a text, without labels, everything read through the packed cache.

    With --rollout each cache writes on after the rows, and full precision judges what it wrote; with --draft as well
    it, a draft model guesses what is written.

    Example: qattn compare --method turbo --method kivi:bits=2 --text book.txt --picture fidelity.png
    """
    from qattn_hf import compare as fidelity
    from qattn_hf.recipes.recipe import find_recipes

    check_options(rollout, temperature, draft, picture)
    recipes = find_recipes(method or DEFAULT)
    name, lm, tokenizer = load(model, device)
    recipes = {spelling: for_family(recipe, lm) for spelling, recipe in recipes.items()}
    own_dtype = measured_in(lm, dtype)
    # a token of the generated text has fewer than eight characters on average
    content = fidelity.made_text(8 * rows * tokens) if text is None else text.read_text(encoding="utf-8")
    ids = fidelity.rows_of(tokenizer, content, rows, tokens)
    with status_line() as progress:
        if draft is not None:
            drafts = load(draft, device).model.to(lm.dtype)
            compared = fidelity.compare_drafts(lm, drafts, recipes, ids, rollout, batch=batch, progress=progress)
        elif rollout:
            choice = fidelity.Choice(temperature)
            compared = fidelity.compare_rollouts(
                lm, recipes, ids, rollout, choice, batch=batch, dtype=own_dtype, progress=progress
            )
        else:
            reading = fidelity.read_as(ids, steps=steps, batch=batch)
            compared = fidelity.compare(lm, recipes, reading, at_tokens=at_tokens, dtype=own_dtype, progress=progress)
    compared = [{"model": short_name(name), **row} for row in compared]
    if as_json:
        print("\n".join(json.dumps(row) for row in compared))
    else:
        show(compared, "drafts" if draft is not None else "rollouts" if rollout else "text", wide)
    if output is not None:
        write_rows(compared, output)
    if picture is not None:
        fidelity.draw(compared, picture, f"{short_name(name)}: {rows} rows of {tokens} tokens")


def show(rows: list[dict[str, Any]], what: str, wide: bool) -> None:
    """Print the rows of `drafts`, of `rollouts` or of a `text` as a table."""
    from qattn_hf import compare as fidelity

    if what == "drafts":
        fidelity.print_drafts(rows)
    elif what == "rollouts":
        fidelity.print_rollouts(rows)
    else:
        fidelity.print_table(rows, wide)


def check_options(rollout: int, temperature: float, draft: str | None, picture: Path | None) -> None:
    """Refuse options that do not go together, before a model is loaded; so a picture without matplotlib."""
    if draft is not None and (not rollout or temperature):
        raise typer.BadParameter("--draft guesses what --rollout N writes, greedily: give N, and no --temperature")
    if rollout and picture is not None:
        raise typer.BadParameter("--picture draws what was read, not --rollout: leave one of them out")
    if picture is not None:
        from qattn_hf.bench.picture import need_matplotlib

        need_matplotlib("--picture")


def measured_in(model: Any, dtype: str) -> Any:
    """Convert a model to the precision to measure in; returns the one in which it was loaded."""
    import torch

    own = model.dtype
    if dtype != "auto":
        model.to(getattr(torch, dtype))
    return own


def status_line() -> Any:
    """Context manager of a status line on stderr; its value is a function that sets the text."""
    from contextlib import contextmanager

    from rich.console import Console

    @contextmanager
    def status() -> Any:
        with Console(stderr=True).status("loading") as shown:
            yield shown.update

    return status()
