"""Tables of what `eval/compile_for.py` recorded: which targets run what, and what kernels take there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from recorded import Result
from table import Row, Rows, Table, every_row

from qattn_kernels.chip import SHARED

GPUS = {
    75: "T4, RTX 2080",
    80: "A100",
    86: "RTX 3090, A10, A40",
    89: "RTX 4090, L4, L40S",
    90: "H100, H200",
    100: "B200",
    120: "RTX 5090, RTX PRO 6000",
}


def _target(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _most(rows: Iterable[Row], figure: str) -> Row:
    """The row with the largest figure; an empty one if no row has it."""
    return max((row for row in rows if figure in row), key=lambda row: row[figure], default={})


def _kib(row: Row) -> float | None:
    return row["shared"] / 1024 if row else None


def _targets(results: list[Result]) -> Iterable[Row]:
    """One row a target, over all methods, head dims and kernels."""
    rows = sorted(every_row(results), key=lambda row: row["capability"])
    for capability, same in groupby(rows, key=lambda row: row["capability"]):
        found = list(same)
        yield {
            "target": _target(capability),
            "gpus": GPUS[capability],
            "limit": SHARED[capability],
            "compiled": sum(row.get("kernels", 0) for row in found),
            "errors": sum(len(row.get("errors", ())) for row in found),
            "kib": _kib(_most(found, "shared")),
            "stack": _most(found, "stack").get("stack"),
            "refused": _refused(found),
        }


def _refused(rows: list[Row]) -> str:
    """Return the refused methods with the reason of each refusal."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if "refused" in row:
            reasons.setdefault(row["refused"], {})[f"`{row['way']}`"] = None
    every = {f"`{row['way']}`" for row in rows}
    return "; ".join(f"{'all' if set(ways) == every else ', '.join(ways)}: {why}" for why, ways in reasons.items())


def _largest(figure: str, key: str, only: str = "") -> Rows:
    """The row with the largest figure for each value of `key` and target; of the kernel `only`, if there is one."""

    def rows(results: list[Result]) -> Iterable[Row]:
        places: dict[tuple, list[Row]] = {}
        for row in every_row(results):
            if figure in row and (not only or row[f"{figure}_of"] == only):
                places.setdefault((row[key], row["capability"]), []).append(row)
        for place in sorted(places):
            row = _most(places[place], figure)
            yield {**row, "target": _target(row["capability"]), "kib": _kib(row)}

    return rows


def _in_order(targets: Iterable[str]) -> list[str]:
    return sorted(targets, key=float)


TABLES = (
    Table(
        "gpu-targets",
        "gpus",
        "| capability | GPUs | a program may have, KiB | largest program, KiB | kernels | errors | "
        "most stack of a thread, bytes | refused |",
        "| {target} | {gpus} | {limit} | {kib:.0f} | {compiled} | {errors} | {stack} | {refused} |",
        rows=_targets,
    ),
    Table(
        "gpu-memory",
        "gpus",
        "| head dim | || {target} || |",
        "| {head_dim} | || {kib:.0f} || |",
        rows=_largest("shared", "head_dim", "attend"),
        across="target",
        order=_in_order,
    ),
    Table(
        "gpu-stack",
        "gpus",
        "| method | || {target} || |",
        "| `{way}` | || {stack}: `{stack_of}` || |",
        rows=_largest("stack", "way"),
        across="target",
        order=_in_order,
    ),
)
