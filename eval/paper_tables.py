"""Tables of the papers' figures: what `eval/papers/` checks, and ours next to theirs as recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from recorded import Result, load, runs_of
from table import Row, Table, markdown


def _int_flash(results: list[Result]) -> Iterable[Row]:
    """INT-FlashAttention's Tables 1 and 2 in percent: a row for each format."""
    for row in (row for result in results for row in result["rows"]):
        for name, ours in row["ours"].items():
            yield row | {"format": name, "figure": ours, "printed": row["paper"].get(name)}


def _sage2(results: list[Result]) -> Iterable[Row]:
    """SageAttention2's accuracy tables in kind: a row for each source, and for the average and the worst layer."""
    for row in (row for result in results for row in result["rows"]):
        for which in ("average", "worst"):
            yield row | {"which": which, "printed": three(row["paper"][which]), "found": three(row[which])}


def three(figures: list[float] | None) -> str:
    """Cosine similarity, relative L1 and RMSE."""
    return "" if figures is None else f"{figures[0]:.2f} % / {figures[1]:.3f} / {figures[2]:.3f}"


def papers_table(results: Path) -> str:
    """The commands of the papers' tables, the claims that each checks, and the models on which they are recorded."""
    from paper import tables  # loads transformers

    rows = []
    for name, table in tables().items():
        fails = re.search(r"Fails if,? (.*?)\.(?:\s+[A-Z]|\s*$)", table.__doc__, re.DOTALL)
        assert fails, f"{name} does not say when it fails"
        record = results / f"table-{name}.json"
        held = ", ".join(run["run"] for run in runs_of(record)) if record.is_file() else ""
        on = held if table.ABOUT.model else "needs no model"
        missing = table.ABOUT.missing.removesuffix(".")
        rows.append([f"`{name}`", table.ABOUT.title, " ".join(fails[1].split()), missing, on])
    return markdown(["name", "what it shows", "fails if", "not reproduced", "recorded on"], rows)


def contradicted_table(results: Path) -> str:
    """What papers claim, where recorded rows show something else, and the likely reason."""
    from paper import tables  # loads transformers
    from papers.common import contradicted
    from papers.sage2 import contradicted as contradicted_by_sage2

    rows = []
    for name, table in tables().items():
        for claim, wrong in contradicted(table, recorded_rows(name, table, results)):
            rows.append([f"`{name}`", claim.says, "<br>".join(wrong), claim.why])
    for result in load(results, "paper-sage2"):
        for says, wrong, why in contradicted_by_sage2(result["rows"]):
            rows.append(["`sage2.py`", says, "<br>".join(wrong), why])
    return markdown(["name", "the paper", "recorded here", "likely because"], rows) if rows else "Nothing is recorded."


def recorded_rows(name: str, table: ModuleType, results: Path) -> list[Row]:
    """Rows of all models; a table that needs no model makes its own."""
    if not table.ABOUT.model:
        return list(table.measure(None)) if hasattr(table, "CLAIMS") else []
    return [row for result in load(results, f"table-{name}") for row in result["rows"]]


TABLES = (
    Table("int-flash", "paper-int-flash",
          "| distribution | tokens || {format} |",
          "| {distribution} | {tokens} || {figure:.2f}{printed: (.2f)} |",
          _int_flash, "format"),
    Table("sage2", "paper-sage2",
          "| what varies | layer | setting || {source} || paper, CogvideoX |",
          "| {table} | {which} | {setting} || {found} || {printed} |",
          _sage2, "source"),
)  # fmt: skip
