"""Tables of the papers' figures: what `eval/papers/` checks, and ours beside theirs as recorded."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from recorded import load, markdown


def int_flash_table(results: Path) -> str:
    """INT-FlashAttention's Tables 1 and 2: ours, and the paper's in brackets, in percent."""
    parts = []
    for result in load(results, "paper-int-flash"):
        names = list(result["rows"][0]["ours"])

        def cell(row: dict[str, Any], name: str) -> str:
            ours = f"{row['ours'][name]:.2f}"
            return f"{ours} ({row['paper'][name]:.2f})" if name in row["paper"] else ours

        rows = [
            [row["distribution"], str(row["tokens"]), *(cell(row, name) for name in names)] for row in result["rows"]
        ]
        parts.append(markdown(["distribution", "tokens", *names], rows))
    return "\n\n".join(parts) or "Not measured yet."


def sage2_table(results: Path) -> str:
    """SageAttention2's accuracy tables in kind: cosine similarity, relative L1 and RMSE by source, and the paper's."""

    def cell(figures: list[float] | None) -> str:
        return "" if figures is None else f"{figures[0]:.2f} % / {figures[1]:.3f} / {figures[2]:.3f}"

    parts = []
    for result in load(results, "paper-sage2"):
        sources = list(dict.fromkeys(row["source"] for row in result["rows"]))
        lines: dict[tuple[str, str, str], dict[str, str]] = {}
        for row in result["rows"]:
            for which in ("average", "worst"):
                line = lines.setdefault((row["table"], which, row["setting"]), {"paper": cell(row["paper"][which])})
                line[row["source"]] = cell(row[which])
        header = ["what varies", "layer", "setting", *sources, "paper, CogvideoX"]
        rows = [[*key, *(line[source] for source in sources), line["paper"]] for key, line in lines.items()]
        parts.append(markdown(header, rows))
    return "\n\n".join(parts) or "Not measured yet."


def papers_table(results: Path) -> str:
    """The commands of the papers' tables, the claims that each checks, and the models on which they are recorded."""
    from paper import tables  # loads transformers

    rows = []
    for name, table in tables().items():
        fails = re.search(r"Fails if,? (.*?)\.(?:\s+[A-Z]|\s*$)", table.__doc__, re.DOTALL)
        assert fails, f"{name} does not say when it fails"
        prefix = f"table-{name}-"
        held = ", ".join(path.stem.removeprefix(prefix) for path in sorted(results.glob(f"{prefix}*.json")))
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


def recorded_rows(name: str, table: ModuleType, results: Path) -> list[dict[str, Any]]:
    """Those of all models; a table that needs no model makes its own."""
    if not table.ABOUT.model:
        return list(table.measure(None)) if hasattr(table, "CLAIMS") else []
    return [row for result in load(results, f"table-{name}-") for row in result["rows"]]
