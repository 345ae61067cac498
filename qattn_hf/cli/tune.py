"""`qattn tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import DeviceOption, ModelOption, UsageError, write_rows
from qattn_hf.cli.compare import AtTokensOption, DtypeOption, TextOption, measured_in, status_line
from qattn_hf.model.loading import load, short_name

if TYPE_CHECKING:
    from torch import Tensor

    from qattn_hf.tune import Tuned

REFERENCE = "turbo:bits=mixed"

CandidateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        "--method",
        "--methods",
        help="What a layer may be given; may be repeated. bits=mixed of turbo is tried head by head.",
        show_default="formats of all methods, from 2 to 8 bits",
    ),
]
BitsOption = Annotated[
    float | None, typer.Option("--bits", help="Bits a value at --at-tokens, everything counted, such as 3.25.")
]
KlOption = Annotated[float | None, typer.Option("--kl", help="KL to full precision in nats a token, such as 0.005.")]


def tune(
    output: Annotated[Path, typer.Option("--output", "-o", help="The recipe, a YAML file.")],
    model: ModelOption = None,
    text: TextOption = None,
    bits: BitsOption = None,
    kl: KlOption = None,
    candidate: CandidateOption = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of the text that decide.")] = 4,
    check_rows: Annotated[int, typer.Option("--check-rows", min=1, help="Other rows, for the check.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", min=8, help="Tokens of a row; scored after a third of it.")] = 1024,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Last tokens of a checked row, one by one.")] = 64,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Rows read at once; trials share them.")] = 32,
    at_tokens: AtTokensOption = 4096,
    dtype: DtypeOption = "auto",
    check_text: Annotated[
        Path | None, typer.Option("--check-text", help="File for the check.", show_default="other rows of the text")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON row a measurement in place of tables.")
    ] = False,
    trials: Annotated[Path | None, typer.Option("--trials", help="JSON file for every trial.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="PNG file of the trials; needs matplotlib.")] = None,
    device: DeviceOption = None,
) -> None:
    """Write a recipe for a model within a budget: the least KL for --bits, or the fewest bits for --kl.

    Example: qattn tune --model PATH --text book.txt --bits 3.25 --output tuned.yaml
    """
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {output}: a recipe is a .yaml file")
    from qattn_hf.compare import find_recipes, read_as
    from qattn_hf.fidelity.tune import check_candidates
    from qattn_hf.methods import measured_settings
    from qattn_hf.tune import Budget
    from qattn_hf.tune import tune as find

    budget = Budget(bits, kl, at_tokens)
    if picture is not None:
        from qattn_hf.bench.picture import need_matplotlib

        need_matplotlib("--picture")  # before the work, not after it
    # formats that nothing speaks for in a layer are sorted out before they cost time
    candidates = find_recipes(candidate or measured_settings("tune"))
    check_candidates(candidates)
    name, lm, tokenizer = load(model, device)
    own_dtype = measured_in(lm, dtype)
    decide, check = texts(tokenizer, text, check_text, rows, check_rows, tokens)
    with status_line() as progress:
        tuned = find(
            lm, candidates, read_as(decide, batch=batch), read_as(check, steps=steps, batch=batch), budget,
            references=find_recipes([REFERENCE]), dtype=own_dtype, progress=progress,
        )  # fmt: skip
    output.write_text(f"{header(tuned, short_name(name), budget.at_tokens)}{tuned.recipe.as_yaml()}", encoding="utf-8")
    if as_json:
        for row in measured_rows(tuned, short_name(name)):
            print(json.dumps(row))
    else:
        show(tuned)
        print(f"The recipe is in {output}: patch(model, recipe={str(output)!r}).")
    write_trials(tuned, short_name(name), trials, picture)


def texts(
    tokenizer: Any, text: Path | None, check_text: Path | None, rows: int, check_rows: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Rows of tokens `[R, T]` that decide, and others for the check: of one text, or of a file each."""
    from qattn_hf.compare import made_text, parted, rows_of

    content = made_text(8 * (rows + check_rows) * tokens) if text is None else text.read_text(encoding="utf-8")
    if check_text is None:
        return parted(rows_of(tokenizer, content, rows + check_rows, tokens), rows)
    other = check_text.read_text(encoding="utf-8")
    return rows_of(tokenizer, content, rows, tokens), rows_of(tokenizer, other, check_rows, tokens)


def write_trials(tuned: Tuned, model: str, trials: Path | None, picture: Path | None) -> None:
    """Every trial as rows in a JSON file, and as a picture, where these are asked for."""
    if trials is not None:
        write_rows(tuned.trials, trials)
    if picture is not None:
        from qattn_hf.tune import draw_sensitivity

        draw_sensitivity(tuned.trials, [option.candidate for option in tuned.chosen], picture, model)


def header(tuned: Tuned, model: str, at_tokens: int) -> str:
    """Comments for the recipe file: model, bits, KL on the rows that decided and on others."""
    measured, checked = tuned.measured, tuned.checked[0]
    bits = f"{measured['effective_bits_total']:.3f} bits a value at {at_tokens} tokens"
    return (
        f"# Tuned for {model} by `qattn tune`: {bits}, everything counted.\n"
        f"# KL to full precision {measured['kl']:.6f} on the {measured['rows']} rows of "
        f"{measured['tokens']} tokens that decided, {checked['kl']:.6f} on {checked['rows']} others.\n"
    )


def measured_rows(tuned: Tuned, model: str) -> list[dict[str, Any]]:
    """Rows of the recipe on the text that decided, then of the recipe and the references on other text."""
    first = {"on": "rows that decided", "predicted_kl": tuned.predicted, **tuned.measured}
    rows = [first, *({"on": "other rows", **row} for row in tuned.checked)]
    return [{"model": model, **{key: value for key, value in row.items() if key != "layers"}} for row in rows]


def show(tuned: Tuned) -> None:
    """Print the choice for each layer, then the recipe and the references on rows that it was not tuned on."""
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
    print(
        f"KL predicted {tuned.predicted:.6f}, measured {tuned.measured['kl']:.6f} on the same rows; on "
        f"{tuned.checked[0]['rows']} rows that it was not tuned on:"
    )
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
