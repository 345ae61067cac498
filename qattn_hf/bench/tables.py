"""Benchmark rows as tables, a header and lines of text, for the terminal and the documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qattn_hf.messages.console import print_figures, results_console

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def ways(rows: Iterable[Row], packed: bool) -> list[str]:
    """Return the names of the packed ways among rows, or of the stock ways, in order."""
    return list(dict.fromkeys(row["way"] for row in rows if row["packed"] == packed))


def best_stock(rows: Iterable[Row]) -> Row | None:
    """Return the row of PyTorch's fastest way, such as an SDPA backend, among rows of one point. None if none ran."""
    stock = (row for row in rows if not row["packed"] and not row.get("peer") and "ms" in row)
    return min(stock, key=lambda row: row["ms"], default=None)


def by_point(rows: Iterable[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Group rows by the values of `keys`: `{(1, 4096): [row, ...], ...}` for `"batch", "context"`."""
    points: dict[tuple, list[Row]] = {}
    for row in rows:
        points.setdefault(tuple(row[key] for key in keys), []).append(row)
    return points


def gains(rows: Iterable[Row], *keys: str) -> dict[tuple, dict[str, float]]:
    """Return the speed-up of each packed way over the fastest stock way, at each point of `keys`."""
    speedups = {}
    for point, here in by_point(rows, *keys).items():
        if best := best_stock(here):
            speedups[point] = {row["way"]: best["ms"] / row["ms"] for row in here if row["packed"] and "ms" in row}
    return speedups


def decode_table(rows: list[Row]) -> Table:
    """Tabulate the milliseconds of a decode step, with the speed-up of peers and packed ways over the best SDPA.

    Points with spare capacity are compared with the same cache without spare capacity.
    """
    methods = [*ways((row for row in rows if row.get("peer")), packed=False), *ways(rows, packed=True)]
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
    """Tabulate the TOPS of a prefill for each way. `SDPA` marks prompts attended by SDPA and written by kernels."""
    names = [*ways(rows, packed=False), *ways(rows, packed=True)]
    lines = []
    for (batch, tokens), found in by_point(rows, "batch", "tokens").items():
        cells = {row["way"]: _figure(row, "tops", ".3g") + _by_sdpa(row) for row in found}
        lines.append([f"{batch} x {tokens}", *(cells.get(name, "") for name in names)])
    return ["B x tokens", *names], lines


def generate_table(rows: list[Row]) -> Table:
    """Tabulate times and memory of `generate` for each way.

    `set-up` is the extra time in seconds of a process's first call over a call without set-up. `again` is the set-up in
    seconds that every later call still has after its first token.
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


def first_call_table(rows: list[Row]) -> Table:
    """Tabulate kernels compiled and seconds waited, in processes without and with kernels on disk."""
    lines = [[row["way"], row["cache"], str(row["kernels"]), _figure(row, "wait_s", ".1f")] for row in rows]
    return ["way", "kernels on disk", "compiled", "wait, s"], lines


def throughput_table(rows: list[Row]) -> Table:
    """Tabulate the rows that fit the same memory, and their tokens per second with the gain over the best stock way."""
    lines = []
    for (kv_mib, context), found in by_point(rows, "kv_mib", "context").items():
        best = max((row["tokens_per_s"] for row in found if not row["packed"] and "error" not in row), default=None)
        for row in found:
            gain = f" ({row['tokens_per_s'] / best:.2f}x)" if best and row["packed"] and "error" not in row else ""
            figures = [_figure(row, "batch", ".0f"), _figure(row, "ms_per_token", ".2f")]
            lines.append([f"{kv_mib / 1024:g}", str(context), row["way"], *figures,
                          _figure(row, "tokens_per_s", ".0f") + gain])  # fmt: skip
    return ["KV, GiB", "context", "way", "rows", "ms a token", "tokens a second"], lines


def requests_table(rows: list[Row]) -> Table:
    """Tabulate the requests held at once over pools of the same bytes, and answer tokens per second."""
    lines = []
    for (kv_mib, requests), found in by_point(rows, "kv_mib", "requests").items():
        for row in found:
            figures = [_figure(row, "held", ".0f"), _figure(row, "seconds", ".1f"), _figure(row, "tokens_per_s", ".0f")]
            lines.append([f"{kv_mib / 1024:g}", str(requests), row["way"], *figures])
    return ["KV, GiB", "requests", "way", "held at once", "seconds", "tokens a second"], lines


def tiles_table(rows: list[Row]) -> Table:
    """Tabulate the milliseconds of prompts for each configuration, the fastest first."""
    fields = ("bn", "tail", "warps", "stages", "queries")
    lines = []
    for (batch, tokens, way, kind), found in by_point(rows, "batch", "tokens", "way", "kind").items():
        for row in sorted(found, key=lambda row: row.get("ms", float("inf"))):
            cells = [str(row[key]) for key in fields]
            lines.append([f"{batch} x {tokens}", way, kind, *cells, _figure(row, "ms", ".4f")])
    return ["B x tokens", "way", "products", "slots", "last tile", "warps", "stages", "queries", "ms"], lines


TABLES = {
    "decode": decode_table,
    "prefill": prefill_table,
    "generate": generate_table,
    "first-call": first_call_table,
    "throughput": throughput_table,
    "requests": requests_table,
    "tiles": tiles_table,
}


def table(rows: list[Row]) -> Table:
    """Return the header and lines of text for the rows of one bench."""
    return TABLES[rows[0]["bench"]](rows)


def computed_by(rows: list[Row]) -> str:
    """Return a sentence that says whether Triton or the reference computed the packed ways."""
    impls = sorted({row["impl"] for row in rows if row.get("impl")})
    return f"Packed ways computed by: {', '.join(impls) or 'none ran'}."


def print_table(rows: list[Row], wide: bool = False) -> None:
    """Print the rows of one bench as a table, with the device and what computed the packed ways."""
    from qattn_hf.messages.origin import device_name, versions

    console = results_console()
    print_figures(*table(rows), ["way", "ran", "best SDPA"], wide)
    console.print(f"{device_name()}, torch {versions()['torch']}. {computed_by(rows)}")


def _figure(row: Row, key: str, form: str, factor: float = 1.0) -> str:
    if "error" in row:
        return "failed"
    return "" if row.get(key) is None else format(row[key] * factor, form)


def _by_sdpa(row: Row) -> str:
    return " SDPA" if row.get("prompt") == "sdpa" else ""


def _times_faster(row: Row, best: Row | None) -> str:
    return f" ({best['ms'] / row['ms']:.2f}x)" if best and "ms" in row else ""


def _change(row: Row, other: Row | None) -> str:
    return f" ({row['ms'] / other['ms'] - 1:+.1%})" if other and "ms" in row and "ms" in other else ""


def progress(row: Row) -> str:
    """Return one line about a measured row."""
    keys = "kv_mib", "batch", "context", "tokens", "cache", "kernels"
    place = ", ".join(f"{key} {row[key]}" for key in keys if key in row)
    place += f", room for {row['context'] * row['room']}" if row.get("room", 1) > 1 else ""
    if "error" in row:
        return f"{place}: {row['way']}: {row['error']}"
    figures = {"ms": "ms", "tops": "TOPS", "gb_per_s": "GB/s", "ms_per_token": "ms a token", "step_ms": "ms a step"}
    figures |= {"wait_s": "s of waiting", "tokens_per_s": "tokens a second"}
    values = ", ".join(f"{row[key]:.4g} {unit}" for key, unit in figures.items() if row.get(key) is not None)
    ran = ", ".join(str(row[key]) for key in ("impl", "decode") if row.get(key))
    return f"{place}: {row['way']}: {values}" + (f" ({ran})" if ran else "")
