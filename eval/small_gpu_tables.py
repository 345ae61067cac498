"""Tables of `docs/small-gpus.md`: what fits a card of 24 GB, and lower bounds of a step's time."""

from __future__ import annotations

from collections.abc import Iterable

from recorded import Result
from table import Row, Table, every_row

from qattn_hf.planning.cards import CARDS

TITLES = {"none": "bf16", "int8": "`int8`", "turbo": "`turbo`", "low2": "`low2`"}
PACKED = ("int8", "turbo", "low2")
STEPS = {"RTX 3090": "rtx-3090", "RTX 4090": "rtx-4090", "L4": "l4"}
GB = 1e9


def _context(row: Row) -> str:
    """The longest context in words: at most the model's positions."""
    return f"all {row['positions']:,}" if row["longest"] >= row["positions"] else f"{row['longest']:,}"


def _milliseconds(row: Row, card: str) -> float:
    """The time in which a card reads the weights and the cache of one row."""
    return (row["read_bytes"] + row["step_kv_bytes"]) / (CARDS[card].bandwidth * GB) * 1e3


def _rate(row: Row) -> float:
    """Tokens a second of the largest batch, if an RTX 3090 only reads weights and cache."""
    n_bytes = row["read_bytes_many"] + row["rows"] * row["row_bytes"]
    return float(row["rows"] * CARDS["rtx-3090"].bandwidth * GB / n_bytes)


def _rows(results: list[Result]) -> Iterable[Row]:
    rows = [*every_row(results)]
    full = {row["model"]: row for row in rows if row["setting"] == "none"}
    for row in rows:
        steps = {title: _milliseconds(full[row["model"]], card) for title, card in STEPS.items()}
        times = steps["RTX 3090"] / _milliseconds(row, "rtx-3090")
        yield row | steps | {"title": TITLES[row["setting"]], "fits": _context(row), "rate": _rate(row), "times": times}


TABLES = (
    Table("small-gpus-context", "small-gpus",
          "| model | weights || {title} |",
          "| {model} | {weights}, {weight_bytes:GiB.1f} GiB || {fits} |",
          _rows, "setting", tuple(TITLES)),
    Table("small-gpus-batch", "small-gpus",
          "| model || {title} |",
          "| {model} || {rows} ({rate:,.0f}) |",
          _rows, "setting", tuple(TITLES)),
    Table("small-gpus-step", "small-gpus",
          f"| model | {' | '.join(f'bf16, {title}' for title in STEPS)} || {{title}} |",
          f"| {{model}} | {' | '.join(f'{{{title}:.1f}} ms' for title in STEPS)} || {{times:.2f}}x |",
          _rows, "setting", PACKED),
)  # fmt: skip
