"""The command that runs transformers' own tests over patched models, and what it recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_eval_scripts import ROOT, script

own_tests = script("transformers_tests")


def test_what_is_refused_by_design_is_told_from_what_fails():
    failed = {"outcome": "failed", "reason": "False is not true", "statement": "self.assertTrue(same)"}
    assert own_tests.judged(failed) == ("failed", "False is not true")
    asserted = next(iter(own_tests.BY_DESIGN))
    outcome, why = own_tests.judged({**failed, "statement": f"{asserted}  # the default"})
    assert outcome == "refused" and "DynamicCache" in why
    assert own_tests.judged({"outcome": "passed", "reason": "", "statement": ""}) == ("passed", "")


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path):
    with pytest.raises(SystemExit, match="is no checkout of transformers"):
        own_tests.version_of(tmp_path)


def test_no_recorded_test_of_transformers_fails():
    """Each one that passes with stock models passes or is refused with a reason; of each method most pass."""
    rows = json.loads((ROOT / "eval/results/transformers-tests.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row.get("stock") == "passed"]
    for method in own_tests.METHODS:
        assert {row[method] for row in rows} == {"passed", "refused"}
        assert all(row["why"].get(method) for row in rows if row[method] == "refused")
        assert sum(row[method] == "passed" for row in rows) > len(rows) / 2
