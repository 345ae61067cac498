"""`qattn bench decode --peers` checks a peer's output before it times the peer, and names what is not installed."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from qattn_hf.bench import decode, peers, tables
from qattn_hf.bench.layers import Heads

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32, torch.bfloat16)
POINT = decode.Point(2, 100)


class Fake:
    """A peer of pages of 16 tokens. It makes one mistake: `nothing written`, `last unread`, or `not finite`."""

    choices = (1, 2)

    def __init__(self, mistake: str | None, heads: Heads, batch: int, context: int, device: torch.device):
        self.mistake, self.context, pages = mistake, context, -(-context // 16)
        self.pages = [torch.randn(batch * pages, 16, heads.kv, heads.dim, dtype=heads.dtype) for _ in range(2)]
        self.write, self.writer = peers.token_writer(*self.pages, context)

    def contents(self):
        rows = (x.view(-1, math.ceil(self.context / 16) * 16, *x.shape[2:]) for x in self.pages)
        return tuple(x[:, : self.context].transpose(1, 2) for x in rows)

    def step(self, choice, token):
        def run():
            if self.mistake != "nothing written":
                self.write(token)
            keys, values = (x[:, :, : -1 if self.mistake == "last unread" else None] for x in self.contents())
            out = F.scaled_dot_product_attention(token.q, keys, values, enable_gqa=True)
            return out * (math.nan if self.mistake == "not finite" else 1)

        return run


def library(mistake: str | None = None, module: str = "torch") -> peers.Library:
    return peers.Library(partial(Fake, mistake), module, f"{module}-wheel")


def rows(mistake: str | None, point: decode.Point = POINT, heads: Heads = HEADS) -> list[dict]:
    measured = decode.rows([point], {}, heads, CPU, {"fake": library(mistake)})
    return [row for row in measured if row["way"] == "fake"]


@pytest.mark.parametrize("context", [1, 16, 100])
def test_a_right_peer_is_timed(context: int):
    (row,) = rows(None, decode.Point(2, context))
    assert row["ms"] > 0 and row["peer"] and not row["packed"] and row["writer"] == "copies"
    assert row["kv_bytes"] == 2 * context * HEADS.bytes_per_token()
    assert row["choice"] in Fake.choices and row["difference"] < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("mistake", ["nothing written", "last unread", "not finite"])
def test_a_wrong_peer_is_an_error(mistake: str):
    (row,) = rows(mistake)
    assert "wrong output" in row["error"] and "ms" not in row


def test_the_fastest_choice_counts(monkeypatch: pytest.MonkeyPatch):
    times = iter([3.0, 2.0])
    monkeypatch.setattr(decode, "_backends", lambda *_: {})
    monkeypatch.setattr(decode, "measure", lambda *_: decode.Times(next(times), 1.0, 4.0, 1))
    (row,) = rows(None)
    assert (row["choice"], row["ms"]) == (2, 2.0)


def test_spare_capacity_is_not_for_peers():
    assert rows(None, POINT._replace(room=4)) == []


def test_rounding_to_fp8_is_allowed():
    """A query and weights in FP8, as FP8 kernels have them, are within the tolerance at long contexts too."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(peers.FP8).double()

    heads = Heads(32, 8, 128, torch.bfloat16)
    for context in (256, 4096):
        token = peers.telling_token(heads, 1, context, CPU)
        cache = Fake(None, heads, 1, context, CPU)
        cache.pages = [x.to(peers.FP8) for x in cache.pages]
        cache.write, _ = peers.token_writer(*cache.pages, context)
        cache.write(token)
        keys, values = (x.double().repeat_interleave(4, dim=1) for x in cache.contents())
        scores = rounded(token.q) @ keys.mT * heads.dim**-0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = rounded(weights * 448) / 448 @ values / weights.sum(-1, keepdim=True)
        assert 0.01 < peers.check(out, token, cache) < torch.finfo(peers.FP8).eps


def test_peers_are_measured_where_they_are_installed(qattn, monkeypatch: pytest.MonkeyPatch):
    known = {"right": library(), "wrong": library("last unread"), "absent": library(module="no_such_module")}
    monkeypatch.setattr(peers, "PEERS", known)
    options = ("--device", "cpu", "--batch", "1", "--context", "64", "--method", "none", "--json")
    code, out, err = qattn("bench", "decode", "--peers", *options)
    measured = {row["way"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and "ms" in measured["none"] and "absent" not in measured
    assert "absent: not installed. Fix: pip install no_such_module-wheel" in err.splitlines()
    assert "wrong output" in measured["wrong"]["error"]
    code, out, err = qattn("bench", "decode", *options)
    assert code == 0 and "right" not in out and "absent" not in err


def test_the_table_compares_peers_with_the_best_sdpa():
    shape = {"bench": "decode", "batch": 1, "context": 4096, "room": 1, "packed": False}
    measured = [
        {**shape, "way": "sdpa flash", "ms": 0.25},
        {**shape, "way": "fa3 fp8", "peer": True, "ms": 0.125},
        {**shape, "way": "xqa fp8", "peer": True, "error": "no compiler"},
        {**shape, "way": "turbo", "packed": True, "ms": 0.0625},
    ]
    header, lines = tables.table(measured)
    assert header == ["B", "context", "best SDPA", "ms", "fa3 fp8, ms", "xqa fp8, ms", "turbo, ms"]
    assert lines == [["1", "4096", "flash", "0.2500", "0.1250 (2.00x)", "failed", "0.0625 (4.00x)"]]
