"""`qattn bench requests`: pools of the same bytes, for models with and without windows."""

from __future__ import annotations

import json

import pytest
from test_bench import bench

from qattn_hf.bench.model import TINY

__all__ = ["bench"]


@pytest.mark.slow
def test_requests_share_pools_of_the_same_bytes(bench):
    code, out, err = bench("requests", "--json", "--method", "int8", "--method", "turbo")
    rows = {row["way"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and list(rows) == ["model precision, sdpa", "int8", "turbo"]
    assert "tokens a second" in err and not any("error" in row for row in rows.values())
    for row in rows.values():
        assert 0.9 < row["kv_bytes"] / (row["kv_mib"] * 2**20) <= 1
        assert 1 <= row["held"] <= row["requests"]
    assert rows["int8"]["blocks"] > 1.5 * rows["model precision, sdpa"]["blocks"]


def test_requests_are_measured_with_windows(bench, tmp_path):
    """Of a config, with memory and lengths from the command line; packed windows leave room for more blocks."""
    kinds = ["sliding_attention", "full_attention"]
    shape = {"model_type": "gemma3_text", "sliding_window": 20, "layer_types": kinds}
    (path := tmp_path / "shape.json").write_text(json.dumps(shape | TINY), encoding="utf-8")
    given = "--random-weights", "--kv-memory", "2MiB", "--longest", "64", "--batch-tokens", "32"
    methods = "--method", "int8", "--method", "int8:sliding=packed"
    code, out, _ = bench("requests", str(path), "--json", *given, *methods)
    rows = {row["way"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and not any("error" in row for row in rows.values())
    assert {(row["kv_mib"], row["longest"], row["batch_tokens"]) for row in rows.values()} == {(2, 64, 32)}
    exact, packed = rows["int8"], rows["int8:sliding=packed"]
    assert packed["blocks"] > exact["blocks"] and packed["kv_bytes"] <= 2 * 2**20
