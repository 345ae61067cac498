"""Table of transformers' own generation tests over patched models, of `eval/results/transformers-tests.json`."""

from __future__ import annotations

import re
from pathlib import Path

from recorded import Result, load, markdown

ORDER = ("passed", "refused", "failed")
KEYS = {"family", "test", "stock", "reason", "why"}  # the other keys of a row are methods, with the outcome
SHORTEST = re.compile(r"[:;,(]| {2,}")  # where the first words of a refusal end


def own_tests_table(results: Path) -> str:
    """How many tests of each family pass with each method, and which are refused, with the reason."""
    found = next(iter(load(results, "transformers-tests")), None)
    if found is None:
        return "Not measured yet."
    heads = [row for row in found["rows"] if "tests_of" in row]
    rows = [row for row in found["rows"] if row.get("stock") == "passed"]
    methods = [key for key in rows[0] if key not in KEYS]
    others = len(found["rows"]) - len(heads) - len(rows)
    intro = (
        f"Tests of transformers {heads[0]['tests_of']} over transformers {found['versions']['transformers']}, "
        f"`{found['command']}`. {len(rows)} tests pass with stock models and count; {others} do not apply: skipped by "
        "transformers, or failing without us. Of each method: passed, refused, failed."
    )
    families = {row["family"]: [r for r in rows if r["family"] == row["family"]] for row in rows}
    lines = [
        [f"`{family}`", str(len(of)), *(" / ".join(str(_count(of, method, o)) for o in ORDER) for method in methods)]
        for family, of in families.items()
    ]
    counts = markdown(["family", "tests", *(f"`{method}`" for method in methods)], lines)
    return f"{intro}\n\n{counts}\n\n{markdown(['refused with', 'tests', 'which'], _refusals(rows))}"


def _count(rows: list[Result], method: str, outcome: str) -> int:
    return sum(row[method] == outcome for row in rows)


def _refusals(rows: list[Result]) -> list[list[str]]:
    """One line a reason: its first words, how many tests of all families it refuses, and their names."""
    groups: dict[str, set[str]] = {}
    tests: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        for reason in row["why"].values():
            words = SHORTEST.split(reason)[0].strip()
            groups.setdefault(words, set()).add(row["test"].split(".test_")[1])
            tests.setdefault(words, set()).add((row["family"], row["test"]))
    return [
        [words, str(len(tests[words])), ", ".join(f"`{name}`" for name in sorted(groups[words]))] for words in groups
    ]
