"""The scripts of `eval/papers/`, run small: their claims hold on our own numbers, and they print paper and ours."""

from __future__ import annotations

import json

import pytest
from papers import int_flash


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_int_flash_orders_formats_as_its_tables_do(kind: str):
    """And as their definitions say: fewer levels are worse, a scaled format is better than a plain cast, the rotation
    moves little where no channel stands out."""
    ours = int_flash.error(kind, 512, 512)
    assert ours["half"] < ours["full"] < ours["fp8"]
    assert ours["full"] < ours["full, 4-bit Q and K"] and ours["fp8 e4m3, scaled"] < ours["fp8"]
    assert ours["full, Hadamard"] == pytest.approx(ours["full"], rel=0.2)


def test_int_flash_prints_the_papers_figures_beside_ours(capsys, monkeypatch):
    monkeypatch.setattr(int_flash, "error", lambda *_: {"fp8": 3.0, "half": 1.0, "full": 2.0})
    int_flash.main(["--lengths", "2048"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["paper"] for row in rows] == [
        {"fp8": 7.5, "half": 0.802, "full": 4.18},
        {"fp8": 9.15, "half": 0.3, "full": 1.62},
    ]
    with pytest.raises(SystemExit):
        int_flash.main(["--lengths", "1000"])
    assert "the paper has no [1000]" in capsys.readouterr().err


def test_int_flash_fails_where_the_claim_does_not_hold(monkeypatch):
    monkeypatch.setattr(int_flash, "error", lambda *_: {"fp8": 1.0, "half": 1.0, "full": 2.0})
    with pytest.raises(SystemExit, match="does not hold at normal 1024, uniform 1024"):
        int_flash.main(["--lengths", "1024"])
