"""The tables of `eval/paper.py`, each run small with the demo model: its claims hold, and can fail."""

from __future__ import annotations

import json
from typing import Any

import paper
import pytest
from papers import common

SMALL = ["--model", "demo", "--rows", "1", "--tokens", "320", "--chunk", "160", "--steps", "0"]
TABLES = paper.tables()


def rows_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", TABLES)
def test_claims_hold_with_the_demo_model_and_can_fail(name: str, capsys):
    """Our figures in the reverse order must contradict the paper: then the check looks at them."""
    paper.main([name, *SMALL])
    out = capsys.readouterr().out
    rows, table = rows_of(out), TABLES[name]
    assert rows and all(row["table"] == table.ABOUT.title for row in rows)
    assert any(row["ours"] for row in rows)
    assert f"Not reproduced: {table.ABOUT.missing}" in out
    assert table.broken(rows) == []
    assert table.broken(reversed_figures(rows))


def reversed_figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each source's figures of ours in the reverse order of its settings that have the same figures."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((row["source"], *row["ours"]), []).append(i)
    turned = list(rows)
    for places in groups.values():
        for i, j in zip(places, reversed(places), strict=True):
            turned[i] = {**rows[i], "ours": rows[j]["ours"]}
    return turned


def test_a_claim_that_does_not_hold_ends_with_an_error(monkeypatch):
    table = TABLES["sinkq_groups"]
    found = {f"G {g}, R {r}": {"attention_l1": 1.0 + r} for g in table.PAPER for r in table.RESIDUALS}
    monkeypatch.setattr(common, "through", lambda *_: found)
    with pytest.raises(SystemExit, match=r"does not hold:\ndemo: G 32, R 128 \(129\) is not below G 32, R 0 \(1\)"):
        paper.main(["sinkq_groups", *SMALL])
