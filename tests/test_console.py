"""Tables of results: figures are whole, however narrow the terminal is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from qattn_hf.compare import print_table
from qattn_hf.lm_eval import tables

METHODS = ("turbo", "turbo_sink_k4v2:sink_num=2,sink_window=4", "kivi:bits=2,group_size=128,residual_length=32")


@pytest.fixture
def terminal(capsys, monkeypatch):
    """What is printed on a terminal of 80 columns, as lines without colours."""
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    return lambda: re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def compared(method: str) -> dict[str, Any]:
    """A row as `compare` returns it, of figures that are as long as they get."""
    errors = {"cosine": 0.9871, "relative_l1": 0.1234, "rmse": 0.0567}
    return {
        **{"model": "a/model", "method": method, "pareto": True, "impl": "triton", "own_layers": 0},
        **{"rows": 4, "tokens": 1536, "scored_from": 512, "at_tokens": 4096, "ppl_full": 12.345},
        **{"kl": 12.345678, "kl_se": 0.001234, "same_top1": 0.9876, "rms_change": 0.0246},
        **{"ppl_change_pct": 1234.56, "ppl_change_se_pct": 0.78, "attention": {"average": errors, "worst": errors}},
        **{"effective_bits": 10.25, "effective_bits_total": 11.75, "kv_bytes": 1023.4 * 2**20},
    }


FIRST = ["12.345678", "(0.001234)", "0.9876", "10.25", "11.75", "1023.4 MiB"]
REST = ["0.0246", "+1234.56 %", "(0.78)", "0.9871", "0.1234", "0.0567", "triton"]


def test_compare_shows_what_decides_on_a_terminal_of_80_columns(terminal):
    print_table([compared(method) for method in METHODS])
    lines = terminal()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for figure in FIRST:
        assert sum(figure in line for line in lines) == len(METHODS), figure
    assert "--wide" in " ".join(lines) and "Computed by: triton." in " ".join(lines)


def test_a_wide_table_is_whole_too(terminal):
    print_table([compared(method) for method in METHODS], wide=True)
    lines = terminal()
    assert not any("…" in line for line in lines)
    for figure in FIRST + REST:
        assert sum(figure in line for line in lines) >= len(METHODS), figure


def test_scores_are_whole(terminal):
    row = {
        "task": "gsm8k_cot",
        "metric": "exact_match",
        "filter": "flexible-extract",
        "value": 0.7654,
        "stderr": 0.0123,
    }
    row |= {"n": 1319, "requests": 1319, "packed_requests": 1319, "effective_bits": 4.27, "kv_bytes": 1023.4 * 2**20}
    tables.print_table([{"method": method, **row, "tokens_per_second": 1234.5} for method in METHODS])
    lines = terminal()
    assert not any("…" in line for line in lines)
    for figure in ("0.7654", "0.0123", "1319", "100%", "4.27", "1023.4 MiB", "1234.5"):
        assert sum(figure in line for line in lines) == len(METHODS), figure
