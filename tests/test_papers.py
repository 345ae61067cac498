"""The scripts of `eval/papers/`, run small: their claims hold on our own numbers, and they print paper and ours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from papers import int_flash, sage2


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


def small_layers(monkeypatch: pytest.MonkeyPatch) -> list[sage2.Layer]:
    for name, value in (("LAYERS", 2), ("HEADS", 2), ("TOKENS", 256)):
        monkeypatch.setattr(sage2, name, value)
    return sage2.made()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("smooth", list(sage2.PAPER["smooth"]))
def test_sage2_smoothing_changes_nothing_but_rounding(smooth: str, causal: bool, monkeypatch):
    """With 20 bits and weights in fp16 every way of smoothing is exact attention, up to fp16's own 2^-11."""
    layers = small_layers(monkeypatch)
    fine = replace(sage2.SETTINGS["smooth"][smooth], bits=20, pv="model")
    assert sage2.accuracy(layers, causal, fine)["worst"][1] < 1e-3


def test_sage2_orders_settings_as_its_tables_do(monkeypatch):
    found = list(sage2.rows("made", small_layers(monkeypatch), False))
    assert [wrong for _, wrong in found if wrong] == []
    assert len(found) == sum(map(len, sage2.PAPER.values()))


def test_sage2_groups_are_those_of_threads():
    query, key = sage2.groups(256, "thread", True), sage2.groups(128, "thread", False)
    assert len(query.unique()) == 2 * 32 and len(key.unique()) == 2 * 4
    assert query[0] == query[24] != query[32] and key[0] == key[1] == key[57] != key[2]


def test_sage2_says_which_order_does_not_hold():
    flat = {name: {"average": [99.0, 0.1, 0.1], "worst": [99.0, 0.1, 0.1]} for name in sage2.PAPER["smooth"]}
    assert "net, smooth, worst: both is not below q" in sage2.broken("net", "smooth", flat)


def test_sage2_reads_what_a_model_computes(monkeypatch):
    """Keys and values of every layer, grouped heads, with the tokens that were asked for."""
    from qattn_hf.assets import demo_model_dir

    monkeypatch.setattr(sage2, "TOKENS", 40)
    layers = sage2.of_model(demo_model_dir(), "Question: Tom has 7 apples. " * 20)
    assert len(layers) == 8
    assert [x.shape for x in layers[0]] == [torch.Size([4, 40, 64]), torch.Size([2, 40, 64]), torch.Size([2, 40, 64])]
