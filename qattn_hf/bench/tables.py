"""Rows of the benches as tables: a header and lines of text, for the terminal and for the README alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def ways(rows: Iterable[Row], packed: bool) -> list[str]:
    """Names of the packed ways, or of the stock ones, in order."""
    return list(dict.fromkeys(row["way"] for row in rows if row["packed"] == packed))


def best_stock(rows: Iterable[Row]) -> Row | None:
    """The fastest stock way of one point that could run."""
    return min((row for row in rows if not row["packed"] and "ms" in row), key=lambda row: row["ms"], default=None)


def by_point(rows: Iterable[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Rows with equal values of `keys`, together."""
    points: dict[tuple, list[Row]] = {}
    for row in rows:
        points.setdefault(tuple(row[key] for key in keys), []).append(row)
    return points


def gains(rows: Iterable[Row], *keys: str) -> dict[tuple, dict[str, float]]:
    """At each point of `keys`, how many times faster each packed way is than the fastest stock one there."""
    found = {}
    for point, here in by_point(rows, *keys).items():
        if best := best_stock(here):
            found[point] = {row["way"]: best["ms"] / row["ms"] for row in here if row["packed"] and "ms" in row}
    return found


def decode_table(rows: list[Row]) -> Table:
    """Milliseconds of a step; beside each packed one how many times faster it is than the best SDPA.

    Points with spare room compare with the same cache without it.
    """
    methods = ways(rows, packed=True)
    points = by_point(rows, "batch", "context", "room")
    lines = []
    for (batch, context, room), found in points.items():
        best = best_stock(found)
        stock = [best["way"].removeprefix("sdpa "), f"{best['ms']:.4f}"] if best else ["", ""]
        tight = {row["way"]: row for row in points.get((batch, context, 1), [])} if room > 1 else {}
        cells = {
            row["way"]: _figure(row, "ms", ".4f") + _times_faster(row, best) + _change(row, tight.get(row["way"]))
            for row in found
        }
        title = f"{context}" + (f", room for {context * room}" if room > 1 else "")
        lines.append([str(batch), title, *stock, *(cells.get(name, "") for name in methods)])
    return ["B", "context", "best SDPA", "ms", *(f"{name}, ms" for name in methods)], lines


def prefill_table(rows: list[Row]) -> Table:
    """TOPS of a prompt's attention, way by way."""
    names = [*ways(rows, packed=False), *ways(rows, packed=True)]
    lines = []
    for (batch, tokens), found in by_point(rows, "batch", "tokens").items():
        cells = {row["way"]: _figure(row, "tops", ".3g") for row in found}
        lines.append([f"{batch} x {tokens}", *(cells.get(name, "") for name in names)])
    return ["B x tokens", *names], lines


def generate_table(rows: list[Row]) -> Table:
    """What `generate` takes and keeps, way by way.

    `set-up` is what the first call of all takes longer than a later one would without any set-up; `again` is what every
    later call still takes longer after its first token.
    """
    times = ["ms a token", "step alone, ms", "first token, s", "set-up, s", "again, s"]
    header = ["B", "context", "way", "ran", *times, "KV, GiB", "peak of prefill, GiB", "peak, GiB"]
    lines = []
    for row in rows:
        ran = ", ".join(filter(None, (row["decode"], row["impl"]))) if "decode" in row else row["error"]
        if "setup_s" in row:
            row = {**row, "setup": row["first_token_extra_s"] + row["setup_s"]}
        figures = [_figure(row, key, ".2f") for key in ("ms_per_token", "step_ms")]
        figures += [_figure(row, key, ".3f") for key in ("first_token_s", "setup", "setup_again_s")]
        figures += [_figure(row, key, ".2f", 2**-30) for key in ("kv_bytes", "prefill_peak_bytes", "peak_bytes")]
        lines.append([str(row["batch"]), str(row["context"]), row["way"], ran, *figures])
    return header, lines


TABLES = {"decode": decode_table, "prefill": prefill_table, "generate": generate_table}


def table(rows: list[Row]) -> Table:
    """The table of the bench that made `rows`."""
    return TABLES[rows[0]["bench"]](rows)


def computed_by(rows: list[Row]) -> str:
    """Who computed the packed ways, in a sentence."""
    found = sorted({row["impl"] for row in rows if row.get("impl")})
    return f"Packed ways computed by: {', '.join(found) or 'nobody'}."


def print_table(rows: list[Row]) -> None:
    """Rows of one bench as a table on stdout, with the device and who computed."""
    from rich.console import Console
    from rich.table import Table

    from qattn_hf.bench.origin import device_name, versions

    header, lines = table(rows)
    shown = Table(box=None, pad_edge=False)
    for name in header:
        shown.add_column(name, justify="left" if name in ("way", "ran", "best SDPA") else "right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has no edge
    console.print(shown)
    console.print(f"{device_name()}, torch {versions()['torch']}. {computed_by(rows)}")


def _figure(row: Row, key: str, form: str, factor: float = 1.0) -> str:
    if "error" in row:
        return "failed"
    return "" if row.get(key) is None else format(row[key] * factor, form)


def _times_faster(row: Row, best: Row | None) -> str:
    return f" ({best['ms'] / row['ms']:.2f}x)" if best and "ms" in row else ""


def _change(row: Row, other: Row | None) -> str:
    return f" ({row['ms'] / other['ms'] - 1:+.1%})" if other and "ms" in row and "ms" in other else ""
