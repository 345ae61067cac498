"""`qattn compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qattn_hf.cli._common import DeviceOption, ModelOption, for_family, methods_option, write_rows
from qattn_hf.loading import load, short_name
from qattn_hf.report import size

DEFAULT = ("none", "int8", "turbo", "turbo:bits=mixed", "turbo_sink_k4v2", "kivi", "turboquant")

TextOption = Annotated[
    Path | None, typer.Option("--text", help="File to read.", show_default="sums and lists, made up")
]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Rows of the text.")]
TokensOption = Annotated[int, typer.Option("--tokens", min=8, help="Tokens of a row; scored after a third of it.")]
StepsOption = Annotated[int, typer.Option("--steps", min=0, help="Last tokens of a row that come one by one.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Rows read at once.")]
AtTokensOption = Annotated[int, typer.Option("--at-tokens", min=1, help="Context for which bits are counted.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Precision to measure in; float32 shows the smallest damage, auto is the model's."),
]


def compare(
    model: ModelOption = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    text: TextOption = None,
    rows: RowsOption = 4,
    tokens: TokensOption = 1536,
    steps: StepsOption = 128,
    batch: BatchOption = 4,
    at_tokens: AtTokensOption = 4096,
    dtype: DtypeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON row a method in place of the table.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file for rows, device and versions.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="PNG file; needs matplotlib.")] = None,
    device: DeviceOption = None,
) -> None:
    """Methods beside full precision on a text, without labels, everything read through the packed cache.

    Example: qattn compare --method turbo --method kivi:bits=2 --text book.txt --picture fidelity.png
    """
    from qattn_hf.fidelity.compare import compare as measure
    from qattn_hf.fidelity.texts import made_text, read_as, rows_of
    from qattn_hf.recipe import find_recipes

    if picture is not None:
        from qattn_hf.bench.picture import need_matplotlib

        need_matplotlib("--picture")  # before the work, not after it
    recipes = find_recipes(method or DEFAULT)
    name, lm, tokenizer = load(model, device)
    recipes = {asked: for_family(recipe, lm) for asked, recipe in recipes.items()}
    own_dtype = measured_in(lm, dtype)
    # a token is seldom longer than eight characters of what is made up
    content = made_text(8 * rows * tokens) if text is None else text.read_text(encoding="utf-8")
    reading = read_as(rows_of(tokenizer, content, rows, tokens), steps=steps, batch=batch)
    with telling() as told:
        found = measure(lm, recipes, reading, at_tokens=at_tokens, dtype=own_dtype, told=told)
    found = [{"model": short_name(name), **row} for row in found]
    if as_json:
        for row in found:
            print(json.dumps(row))
    else:
        show(found)
    if output is not None:
        write_rows(found, output)
    if picture is not None:
        from qattn_hf.fidelity.picture import draw

        draw(found, picture, f"{short_name(name)}: {rows} rows of {tokens} tokens")


def measured_in(model: Any, dtype: str) -> Any:
    """Give the model the precision to measure in; returns the one in which it was loaded."""
    import torch

    own = model.dtype
    if dtype != "auto":
        model.to(getattr(torch, dtype))
    return own


def telling() -> Any:
    """A context whose value takes what comes next and shows it on stderr."""
    from contextlib import contextmanager

    from rich.console import Console

    @contextmanager
    def status() -> Any:
        with Console(stderr=True).status("loading") as shown:
            yield shown.update

    return status()


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A header and cells of two lines: below a figure its standard error, below the average layer's the worst one's."""

    def layers(row: dict[str, Any], key: str, form: str) -> str:
        return "\n".join(format(row["attention"][which][key], form) for which in ("average", "worst"))

    def error(value: float | None, form: str) -> str:
        return "" if value is None else f"\n({value:{form}})"

    header = ["", "method", "KL", "same\ntop-1", "RMS\nchange", "perplexity", "cosine", "relative\nL1", "RMSE"]
    lines = []
    for row in rows:
        bits = [row["effective_bits"], row["effective_bits_total"]]
        lines.append(
            [
                "*" if row["pareto"] else "",
                row["method"],
                f"{round(row['kl'], 6) + 0.0:.6f}{error(row['kl_se'], '.6f')}",  # + 0.0: no sign before a zero
                f"{row['same_top1']:.4f}",
                f"{row['rms_change']:.4f}",
                f"{row['ppl_change_pct']:+.2f} %{error(row['ppl_change_se_pct'], '.2f')}",
                layers(row, "cosine", ".4f"),
                layers(row, "relative_l1", ".4f"),
                layers(row, "rmse", ".4f"),
                *("-" if b is None else f"{b:.2f}" for b in bits),
                size(row["kv_bytes"]),
                row["impl"],
            ]
        )
    return [*header, "bits,\nclosed", "bits,\nall", "KV", "computed by"], lines


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    first, (header, lines) = rows[0], table(rows)
    shown = Table(box=None, pad_edge=False)
    for name in header:
        shown.add_column(name, justify="left" if name in ("method", "computed by") else "right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no edge
    console.print(
        f"{first['model']}: {first['rows']} rows of {first['tokens']} tokens, scored from token "
        f"{first['scored_from']}, perplexity in full precision {first['ppl_full']:.3f}"
    )
    console.print(shown)
    console.print(
        "* on the Pareto front of KL and bits. In brackets standard errors over rows. Cosine, relative L1 and RMSE: "
        "attention outputs on full precision's own inputs of each layer, the average layer above the worst one. Bits "
        f"and KV: one row of {first['at_tokens']} tokens."
    )
