"""Tables of the papers' figures: what `eval/papers/` checks, and ours next to theirs as recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable

from recorded import Result
from table import Row, Table, every_row


def _int_flash(results: list[Result]) -> Iterable[Row]:
    """INT-FlashAttention's Tables 1 and 2 in percent: a row for each format."""
    for row in every_row(results):
        for name, ours in row["ours"].items():
            yield row | {"format": name, "figure": ours, "printed": row["paper"].get(name)}


def _sage2(results: list[Result]) -> Iterable[Row]:
    """SageAttention2's accuracy tables in kind: a row for each source, and for the average and the worst layer."""
    for row in every_row(results):
        for which in ("average", "worst"):
            yield row | {"which": which, "printed": three(row["paper"][which]), "found": three(row[which])}


def three(figures: list[float] | None) -> str:
    """Cosine similarity, relative L1 and RMSE."""
    return "" if figures is None else f"{figures[0]:.2f} % / {figures[1]:.3f} / {figures[2]:.3f}"


def _papers(results: list[Result]) -> Iterable[Row]:
    """Yield the commands of the papers' tables, with the claims that each checks and the models of its records."""
    from paper import tables  # loads transformers

    for name, table in tables().items():
        fails = re.search(r"Fails if,? (.*?)\.(?:\s+[A-Z]|\s*$)", table.__doc__, re.DOTALL)
        assert fails, f"{name} does not say when it fails"
        found = (result["name"].partition(":") for result in results)
        on = ", ".join(model for record, _, model in found if record == f"table-{name}")
        said = {"title": table.ABOUT.title, "fails": " ".join(fails[1].split())}
        missing = table.ABOUT.missing.removesuffix(".")
        yield {"name": name, **said, "missing": missing, "on": on if table.ABOUT.model else "needs no model"}


def _contradicted(results: list[Result]) -> Iterable[Row]:
    """What papers claim, where recorded rows show something else, and the likely reason."""
    from paper import tables  # loads transformers
    from papers.common import contradicted
    from papers.sage2 import contradicted as contradicted_by_sage2

    recorded: dict[str, list[Row]] = {}
    for result in results:
        recorded.setdefault(result["name"].partition(":")[0], []).extend(result["rows"])
    for name, table in tables().items():
        made = () if table.ABOUT.model or not hasattr(table, "CLAIMS") else table.measure(None)
        for claim, wrong in contradicted(table, [*recorded.get(f"table-{name}", []), *made]):
            yield {"name": name, "says": claim.says, "wrong": "<br>".join(wrong), "why": claim.why}
    for says, wrong, why in contradicted_by_sage2(recorded.get("paper-sage2", [])):
        yield {"name": "sage2.py", "says": says, "wrong": "<br>".join(wrong), "why": why}


TABLES = (
    Table("int-flash", "paper-int-flash",
          "| distribution | tokens || {format} |",
          "| {distribution} | {tokens} || {figure:.2f}{printed: (.2f)} |",
          _int_flash, "format"),
    Table("sage2", "paper-sage2",
          "| what varies | layer | setting || {source} || paper, CogvideoX |",
          "| {table} | {which} | {setting} || {found} || {printed} |",
          _sage2, "source"),
    Table("papers", "table-*",
          "| name | what it shows | fails if | not reproduced | recorded on |",
          "| `{name}` | {title} | {fails} | {missing} | {on} |",
          _papers),
    Table("contradicted", "table-* paper-sage2",
          "| name | the paper | recorded here | likely because |",
          "| `{name}` | {says} | {wrong} | {why} |",
          _contradicted),
)  # fmt: skip
