"""`qattn bench first-call` measures a process with an empty kernel cache, and another that finds it filled."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from typing import Any

import pytest

from qattn_hf.bench import first_call


@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_first_calls_are_measured_in_two_processes(qattn, monkeypatch, started: bool):
    folders = []

    def here(command: list[str], env: dict[str, str], **_: Any) -> Any:
        """Run what the command would run, in this process."""
        assert command[:3] == [sys.executable, "-m", "qattn_hf.bench.first_call"]
        folders.append(env["TRITON_CACHE_DIR"])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            first_call.main(*command[3:])
        return subprocess.CompletedProcess(command, 0, said.getvalue())

    if not started:
        monkeypatch.setattr(subprocess, "run", here)
    code, out, err = qattn("bench", "first-call", "--method", "int8", "--json", "--device", "cpu")
    cold, warm = (json.loads(line) for line in out.splitlines())
    assert code == 0 and (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert cold["kernels"] == warm["kernels"] == 0  # on a CPU the reference computes
    assert len(cold["waits_s"]) == 2 and cold["wait_s"] == pytest.approx(sum(cold["waits_s"]))
    assert "cache warm, kernels 0: int8: " in err
    assert started or (len(folders) == 2 and len(set(folders)) == 1), "the second process reads the same cache"
