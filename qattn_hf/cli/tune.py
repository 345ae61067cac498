"""`qattn tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    AtTokensOption,
    BatchOption,
    DeviceOption,
    JsonOption,
    MeasuredDtypeOption,
    ModelArgument,
    PictureOption,
    RowsOption,
    TextOption,
    UsageError,
    known_methods,
    measured_in,
    need_picture,
    print_rows,
    read_text,
    status_line,
    text_or_made,
    write_data,
)
from qattn_hf.cli.compare import StepsOption
from qattn_hf.model.loading import load, short_name
from qattn_hf.model.positions import positions_of

if TYPE_CHECKING:
    from torch import Tensor

    from qattn_hf.tune import Tuned

# One long row costs as much as several short ones, and measures losses in a context of real length.
# 4,096 tokens without 70 are whole chunks: a shorter last one would need kernels for short calls.
ROWS, CHECK_ROWS, TOKENS, STEPS, BATCH, AT_TOKENS = 1, 2, 4096, 70, 16, 4096

CandidateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Method or recipe that a layer may get. Repeatable. turbo:bits=mixed is tried head by head.",
        show_default="formats of all methods, from 2 to 8 bits",
        callback=known_methods,
    ),
]
CheckRowsOption = Annotated[int, typer.Option("--check-rows", min=1, help="Other rows, which check the recipe.")]
LongRowsOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=8,
        help="Tokens of a row. The last two thirds are scored.",
        show_default=f"{TOKENS}, or the model's context if it is shorter",
    ),
]
BitsOption = Annotated[
    float | None, typer.Option("--bits", help="Budget in bits a value at --at-tokens, such as 3.25.")
]
KlOption = Annotated[
    float | None, typer.Option("--kl", help="Budget in KL to full precision, in nats a token, such as 0.005.")
]


def tune(
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file for the recipe.")],
    model: ModelArgument = None,
    text: TextOption = None,
    bits: BitsOption = None,
    kl: KlOption = None,
    method: CandidateOption = None,
    rows: RowsOption = ROWS,
    check_rows: CheckRowsOption = CHECK_ROWS,
    tokens: LongRowsOption = None,
    steps: StepsOption = STEPS,
    batch: BatchOption = BATCH,
    at_tokens: AtTokensOption = AT_TOKENS,
    check_text: Annotated[
        Path | None,
        typer.Option("--check-text", help="File with text for the check.", show_default="other rows of --text"),
    ] = None,
    dtype: MeasuredDtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    trials: Annotated[Path | None, typer.Option("--trials", help="JSON file for all trials.")] = None,
    picture: PictureOption = None,
) -> None:
    """Write a recipe for a model within a budget of bits or KL.

    With --bits, find the least KL within a number of bits. With --kl, find the fewest bits within a KL.

    Example: qattn tune MODEL --text book.txt --bits 3.25 --output tuned.yaml
    """
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {output}: a recipe is a .yaml file")
    from qattn_hf.compare import find_recipes, read_as
    from qattn_hf.fidelity.tuner import check_candidates
    from qattn_hf.methods import measured_settings
    from qattn_hf.tune import Budget
    from qattn_hf.tune import tune as find

    budget = Budget(bits, kl, at_tokens)
    need_picture(picture)
    # formats that nothing speaks for in a layer are sorted out before they cost time
    candidates = find_recipes(method or measured_settings("tune"))
    check_candidates(candidates)
    name, lm, tokenizer = load(model, device)
    own_dtype = measured_in(lm, dtype)
    decide, check = texts(tokenizer, text, check_text, rows, check_rows, tokens or tokens_for(lm.config))
    with status_line() as progress:
        tuned = find(
            lm, candidates, read_as(decide, batch=batch), read_as(check, steps=steps, batch=batch), budget,
            dtype=own_dtype, progress=progress,
        )  # fmt: skip
    output.write_text(f"{header(tuned, short_name(name), budget.at_tokens)}{tuned.recipe.as_yaml()}", encoding="utf-8")
    if as_json:
        print_rows(measured_rows(tuned, short_name(name)))
    else:
        show(tuned)
        print(f"The recipe is in {output}: patch(model, recipe={str(output)!r}).")
    write_trials(tuned, short_name(name), trials, picture)


def tokens_for(config: Any) -> int:
    """Return the default number of tokens of a row for a model."""
    return min(TOKENS, positions_of(config) or TOKENS)


def texts(
    tokenizer: Any, text: Path | None, check_text: Path | None, rows: int, check_rows: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Rows of tokens `[R, T]` that decide, and others for the check: of one text, or of a file each."""
    from qattn_hf.compare import parted, rows_of

    content = text_or_made(text, (rows + check_rows) * tokens)
    if check_text is None:
        return parted(rows_of(tokenizer, content, rows + check_rows, tokens), rows)
    return rows_of(tokenizer, content, rows, tokens), rows_of(tokenizer, read_text(check_text), check_rows, tokens)


def write_trials(tuned: Tuned, model: str, trials: Path | None, picture: Path | None) -> None:
    """Every trial as rows in a JSON file, and as a picture, where these are asked for."""
    write_data({"rows": tuned.trials}, trials)
    if picture is not None:
        from qattn_hf.tune import draw_sensitivity

        draw_sensitivity(tuned.trials, [option.candidate for option in tuned.chosen], picture, model)


def header(tuned: Tuned, model: str, at_tokens: int) -> str:
    """Comments for the recipe file: model, bits, KL on rows that it was not tuned on."""
    checked = tuned.checked[0]
    bits = f"{checked['effective_bits_total']:.3f} bits a value at {at_tokens} tokens"
    return (
        f"# Tuned for {model} by `qattn tune`: {bits}, everything counted.\n"
        f"# KL to full precision {checked['kl']:.6f}, on {checked['rows']} rows of {checked['tokens']} tokens that it "
        "was not tuned on.\n"
    )


def measured_rows(tuned: Tuned, model: str) -> list[dict[str, Any]]:
    """Rows of the recipe on the text that decided, then on other text."""
    measured = tuned.measured or {"method": "tuned"}
    first = {"on": "rows that decided", "predicted_kl": tuned.predicted, **measured}
    rows = [first, *({"on": "other rows", **row} for row in tuned.checked)]
    return [{"model": model, **{key: value for key, value in row.items() if key != "layers"}} for row in rows]


def show(tuned: Tuned) -> None:
    """Print the choice for each layer, then the recipe on rows that it was not tuned on."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no edge
    chosen = Table(box=None, pad_edge=False)
    for name in ("layer", "candidate", "K heads of 2 bits", "V heads of 2 bits", "KL alone"):
        chosen.add_column(name, justify="right" if name in ("layer", "KL alone") else "left")
    for layer, option in enumerate(tuned.chosen):
        heads = (" ".join(map(str, low)) for low in (option.k_low, option.v_low))
        chosen.add_row(str(layer), option.candidate, *heads, f"{option.kl:.6f}")
    console.print(chosen)
    if tuned.uniform is not None:
        print("Best of one candidate for all layers: {}, KL predicted {:.6f}.".format(*tuned.uniform))
    measured = "" if tuned.measured is None else f", measured {tuned.measured['kl']:.6f} on the same rows"
    others = f"on {tuned.checked[0]['rows']} rows that it was not tuned on"
    print(f"KL predicted {tuned.predicted:.6f}{measured}; {others}:")
    checked = Table(box=None, pad_edge=False)
    for name in ("recipe", "KL", "same top-1", "bits, closed", "bits, all"):
        checked.add_column(name, justify="left" if name == "recipe" else "right")
    for row in tuned.checked:
        error = "" if row["kl_se"] is None else f" ({row['kl_se']:.6f})"
        bits = (row["effective_bits"], row["effective_bits_total"])
        checked.add_row(
            row["method"], f"{row['kl']:.6f}{error}", f"{row['same_top1']:.4f}", *(f"{b:.3f}" for b in bits)
        )
    console.print(checked)
