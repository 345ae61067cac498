"""A generated table, declared: the records that it reads, its heading and line as in Markdown, and their rows."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorded import Result, load

Row = dict[str, Any]
Rows = Callable[[list[Result]], Iterable[Row]]
UNITS = {"GiB": 2**-30, "MiB": 2**-20, "us": 1e3, "M": 1e-6}  # factors of figures
NOT_MEASURED = "Not measured yet."


class _Figures(string.Formatter):
    """Formats as Python's, with a unit before one (`{kv_bytes:GiB.2f}`), or in brackets (`{times: (.2fx)}`)."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec.startswith(" ("):
            inner = spec[2:-1]
            times = "x" if inner.endswith("x") else ""
            return "" if value is None else f" ({self.format_field(value, inner.removesuffix('x'))}{times})"
        unit = next((unit for unit in UNITS if spec.startswith(unit)), None)
        return super().format_field(value, spec) if unit is None else format(value * UNITS[unit], spec[len(unit) :])

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key)


FORMATTER = _Figures()


def text_of(cell: str, row: Row) -> str:
    """A cell of `row`: empty where it names a figure outside of brackets that the row lacks, or has as None."""
    needed = [name for _, name, spec, _ in FORMATTER.parse(cell) if name and not (spec or "").startswith(" (")]
    return "" if any(row.get(name) is None for name in needed) else FORMATTER.vformat(cell, (), row)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def every_row(results: list[Result]) -> Iterable[Row]:
    return (row for result in results for row in result["rows"])


def each(only: Callable[[Row], bool] | None = None, **made: Callable[[Row], Any]) -> Rows:
    """All rows, or some, with what is made of each besides."""
    return lambda results: (
        row | {key: make(row) for key, make in made.items()} for row in every_row(results) if only is None or only(row)
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")] if line.strip("| ") else []


@dataclass(frozen=True)
class Table:
    """A generated part of README or of the documentation.

    Attributes:
        name: of the part.
        records: name patterns of its records, separated by spaces.
        head: the headings, `| B | context |`. Headings between `||` are repeated for each value of `across`.
        line: a cell for each heading, as formats of a row.
        rows: returns the rows of these records in the order of the lines; all by default.
        across: a key. Rows that agree in the first cells share a line.
        order: values of `across` in the order of the columns, or a sort key for them. The default is the rows' order.
        split: text before a table. Each text gets a separate table.
    """

    name: str
    records: str
    head: str
    line: str
    rows: Rows = every_row
    across: str = ""
    order: Sequence[Any] | Callable[[Iterable[Any]], Sequence[Any]] = ()
    split: str = ""

    def __call__(self, results: Path) -> str:
        parts: dict[str, list[Row]] = {}
        for row in self.rows([result for pattern in self.records.split() for result in load(results, pattern)]):
            parts.setdefault(text_of(self.split, row), []).append(row)
        shown = ("\n\n".join(filter(None, [title, self._markdown(rows)])) for title, rows in parts.items())
        return "\n\n".join(shown) or NOT_MEASURED

    def _markdown(self, rows: list[Row]) -> str:
        (head, titles, last_head), (first, cells, last) = (
            [_cells(part) for part in (*line.split("||"), "", "")[:3]] for line in (self.head, self.line)
        )
        if not self.across:
            return markdown(head, [[text_of(cell, row) for cell in first] for row in rows])
        found: dict[Any, Row] = {}  # values of the key, each with its first row
        lines: dict[tuple[str, ...], dict[Any, Row]] = {}
        for row in rows:
            found.setdefault(row[self.across], row)
            lines.setdefault(tuple(text_of(cell, row) for cell in first), {}).setdefault(row[self.across], row)
        values = self._values(found)
        header = [*head, *(text_of(title, found[value]) for value in values for title in titles), *last_head]
        body = []
        for begin, line in lines.items():
            further = [text_of(cell, line.get(value, {})) for value in values for cell in cells]
            body.append([*begin, *further, *(text_of(cell, next(iter(line.values()))) for cell in last)])
        return markdown(header, body)

    def _values(self, found: dict[Any, Row]) -> list[Any]:
        """Values of the key that have columns, in order."""
        order = self.order(found) if callable(self.order) else self.order or found
        return [value for value in order if value in found]
