"""The tables of `eval/paper.py`, each run small with the demo model: its claims hold, and can fail."""

from __future__ import annotations

import json
from typing import Any

import paper
import pytest
import torch
from baselines.evict import FIRST, Evict
from baselines.gear import Gear
from papers import common

from qattn_hf.fidelity.observe import Call
from qattn_kernels.online import Scores

SMALL = ["--model", "demo", "--rows", "1", "--tokens", "320", "--chunk", "160", "--steps", "0"]
TABLES = paper.tables()
MORE = {"sparse_v_threshold": ["--steps", "2"]}  # a long call reads every value
FEWER: dict[str, tuple[str, Any]] = {
    "sparse_v_widths": ("FORMATS", ("q8", "turbo4", "turbo2")),
    "sparse_v_threshold": ("FORMATS", ("q8", "turbo3")),
    "turbo_heads": ("RANKINGS", ("priority", "entropy", "random")),
    "sinkq_groups": ("PAPER", {group: TABLES["sinkq_groups"].PAPER[group] for group in (32, 128)}),
}


def rows_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", TABLES)
def test_claims_hold_with_the_demo_model_and_can_fail(name: str, capsys, monkeypatch):
    """Our figures in the reverse order must contradict the paper: then the check looks at them."""
    if name in FEWER:
        monkeypatch.setattr(TABLES[name], *FEWER[name])
    paper.main([name, *SMALL, *MORE.get(name, [])])
    out = capsys.readouterr().out
    rows, table = rows_of(out), TABLES[name]
    assert rows and all(row["table"] == table.ABOUT.title for row in rows)
    assert any(row["ours"] for row in rows)
    assert f"Not reproduced: {table.ABOUT.missing}" in out
    assert table.broken(rows) == []
    assert table.broken(reversed_figures(rows)) or table.broken(reversed_values(rows))


def reversed_values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its figures of ours under each other's names, for claims about one row."""
    return [{**row, "ours": dict(zip(row["ours"], reversed(row["ours"].values()), strict=True))} for row in rows]


def reversed_figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each source's figures of ours in the reverse order of its settings that have the same figures."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        figures = [name for name in row["ours"] if name != "effective_bits"]  # baselines pack nothing
        groups.setdefault((row["source"], *figures), []).append(i)
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


def test_list_names_every_table(capsys):
    paper.main(["list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TABLES)
    with pytest.raises(SystemExit):
        paper.main(["sinkq_table"])
    assert "no table 'sinkq_table': choose from" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_named():
    with pytest.raises(SystemExit, match="Meta-Llama-3-8B-Instruct is not on this machine"):
        paper.main(["sinkq_groups"])


def test_tasks_read_the_packed_cache_and_a_baseline(capsys, monkeypatch):
    """Full precision, a method and a baseline each answer, and their answers stand beside the paper's figures."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")
    table = TABLES["turbo_accuracy"]
    monkeypatch.setattr(table, "WAYS", {name: table.WAYS[name] for name in (table.FP, table.KIVI_4, table.GEAR_4)})
    monkeypatch.setattr(table, "broken", lambda rows: [])
    paper.main(["turbo_accuracy", *SMALL, "--tasks", "recall_10", "--limit", "1"])
    rows = [row for row in rows_of(capsys.readouterr().out) if row["source"] == "demo, recall_10"]
    assert {row["setting"] for row in rows} == {table.FP, table.KIVI_4, table.GEAR_4}
    assert all(row["ours"]["n"] == 1 and row["paper"]["gsm8k"] for row in rows)


def test_gear_is_exact_where_nothing_is_packed_and_where_rank_is_full():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 192, 16, generator=generator)
    assert torch.equal(Gear(bits=2).kept(x, True, 127), x)
    whole, low, none = (Gear(bits=2, rank=rank, group=64).kept(x, True, 192) for rank in (16, 4, 0))
    torch.testing.assert_close(whole, x, atol=1e-4, rtol=0)
    assert (none - x).norm() > (low - x).norm() > 0
    assert torch.equal(low[:, :, 128:], x[:, :, 128:])


def test_fp22_keeps_thirteen_bits():
    fp22 = TABLES["sage2_sums"].fp22
    kept = torch.tensor([1 + 2**-13, -3.0, 0.0, 2.0**100])
    assert torch.equal(fp22(kept), kept)
    assert fp22(torch.tensor([1 + 2**-15])).item() == 1


def calls(tokens: int, prompt: int) -> tuple[Call, Call]:
    """A prompt, and one call with what follows it; `out` of both is exact."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))
    out, scores = common.exact(q, k, v).transpose(1, 2), Scores(0.25)
    first = Call(0, q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt], scores, out[:, :prompt])
    return first, Call(0, q[:, :, prompt:], k, v, scores, out[:, prompt:])


@pytest.mark.parametrize("how", ["streaming", "h2o", "snapkv"])
def test_evictions_drop_what_they_say_and_nothing_else(how: Any):
    first, later = calls(120, 100)
    whole, some = Evict(how, share=1.0), Evict(how)
    for way in (whole, some):
        assert torch.equal(way(first), first.out)
    torch.testing.assert_close(whole(later), later.out)
    assert (some(later) - later.out).abs().max() > 0.01
    kept = ~some.dropped[0]
    assert kept.sum(-1).unique().tolist() == [16]
    assert kept[..., -8:].all(), "the newest tokens stay"
    assert how != "streaming" or kept[..., :FIRST].all()
