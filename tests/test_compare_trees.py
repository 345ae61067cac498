"""`eval/compare_trees.py`: the order in which two checkouts are measured, and the process that measures one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_trees
import pytest


def test_two_checkouts_are_measured_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The other first and last, when each method of each was compiled; a method that it lacks in this one alone."""
    asked: list[tuple[Path, list[str], bool]] = []

    def measured(
        tree: Path, bench: str, methods: list[str], points: list[Any], warm: bool = False
    ) -> list[dict[str, Any]]:
        asked.append((tree, methods, warm))
        known = [way for way in methods if tree == compare_trees.ROOT or way != "int8"]
        return [{"bench": bench, "way": way, "batch": 1, "tokens": 96, "ms": float(len(asked))} for way in known]

    monkeypatch.setattr(compare_trees, "measured", measured)
    compare_trees.main(
        [str(tmp_path), "--points", "1x96", "--bench", "prefill", "--methods", "turbo:k_bits=4,v_bits=2,int8"]
    )
    both, here = ["turbo:k_bits=4,v_bits=2", "int8"], compare_trees.ROOT
    compiled = [(tree, [way], True) for tree in (tmp_path, here) for way in both]
    assert sorted(asked[:4], key=str) == sorted(compiled, key=str)
    assert asked[4:] == [(tmp_path, both, False), (here, both, False), (tmp_path, both[:1], False)]
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["tree"], row["pass"], row["way"]) for row in rows] == [
        ("before", 0, both[0]),
        ("after", 1, both[0]),
        ("after", 1, "int8"),
        ("before", 2, both[0]),
    ]
    said = f"# prefill {both[0]} 1x96: 5.0000 ms, now 6.0000: 0.833x, and once more 7.0000"
    assert lines[len(rows) :] == [said], "nothing to compare int8 with"


@pytest.mark.slow
@pytest.mark.product("decode-int8", most=0)
@pytest.mark.parametrize(("bench", "method"), [("prefill", "turbo:k_bits=4,v_bits=2"), ("decode", "int8")])
def test_a_checkout_is_measured_in_a_process_that_imports_it(bench: str, method: str):
    """A method that the checkout does not have is left out."""
    missing = method.replace(method.partition(":")[0], "nonesuch")
    [row] = compare_trees.measured(compare_trees.ROOT, bench, [missing, method], [(1, 96)])
    assert row["bench"] == bench and row["way"] == method and row["ms"] > 0


def test_points_that_are_none_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("16", "1x", "0x512", "1x512 64x512"):
        with pytest.raises(SystemExit):
            compare_trees.main([str(tmp_path), "--points", text])
        assert f"{text!r} is no list of rows x tokens, as 1x512" in capsys.readouterr().err


def test_a_method_that_neither_has_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        compare_trees.main([str(tmp_path), "--points", "1x96", "--methods", "turbo,nonesuch:bits=2"])
    assert "--methods nonesuch: there are " in capsys.readouterr().err
