"""`qattn eval` and `python -m qattn_hf.lm_eval`: what they print and write, and what they refuse."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from qattn_hf.assets import demo_model_dir
from qattn_hf.cli import main

WHY = "lm-eval is not installed: pip install 'qattn-hf[eval]'"
# `python -m qattn_hf.lm_eval` that finds the tasks of this package only. Each process would need 13 seconds for all
OURS = """
import functools, runpy
from lm_eval import tasks
tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)
runpy.run_module("qattn_hf.lm_eval", run_name="__main__", alter_sys=True)
"""
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def qattn(qattn, monkeypatch):
    """Run `qattn eval`. Of lm-eval's tasks it finds ours alone."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason=WHY)
    from qattn_hf.lm_eval import run as evaluation

    few = functools.partial(lm_eval_tasks.TaskManager, include_defaults=False)  # to find all takes 5 seconds
    monkeypatch.setattr(evaluation, "TaskManager", few)
    return functools.partial(qattn, "eval")


@pytest.mark.slow
def test_a_table_of_methods_with_bits_and_bytes(qattn, tmp_path):
    target = tmp_path / "rows.json"
    methods = ("--method", "full", "--method", "turbo:k_bits=4,v_bits=2", "--recipe", "turbo_sink")
    few = ("--limit", "2", "--max-new-tokens", "6", "--dtype", "float32")
    code, out, err = qattn("--task", "recall_10", *few, *methods, "--output", str(target))
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:5] == ["method", "task", "metric", "value", "stderr"]
    assert [line[0] for line in lines[1:4]] == ["full", "turbo:k_bits=4,v_bits=2", "turbo_sink"]
    assert all(line[1:4] == ["recall_10", "exact_match,", "first-number"] for line in lines[1:4])
    written = json.loads(target.read_text())
    full, turbo, _ = written["rows"]
    assert full["n"] == 2 and full["effective_bits"] is None and full["kv_share"] == 1 and full["packed_requests"] == 0
    assert turbo["recipe"]["v_bits"] == 2 and 3 < turbo["effective_bits"] < 4 and turbo["packed_requests"] == 2
    assert "agrees" not in full and 0 <= turbo["agrees"] <= 1
    assert "packed cache" in turbo["mode"] and "nothing packed" in full["mode"]
    assert written["versions"]["torch"] and written["command"].startswith("qattn")


@pytest.mark.slow
def test_lm_evals_own_tasks_are_looked_for_only_where_they_may_be_meant(qattn, monkeypatch):
    """To find them takes seconds."""
    from qattn_hf.lm_eval import run as evaluation

    few, looked = evaluation.TaskManager, []

    def manager(include_defaults: bool = True, **options):
        looked.append(include_defaults)
        return few(**options)

    monkeypatch.setattr(evaluation, "TaskManager", manager)
    arguments = ("--task", "recall_10", "--limit", "1", "--method", "int8", "--max-new-tokens", "2")
    assert qattn(*arguments)[0] == 0 and looked == [False]
    code, _, err = qattn("--task", "recall_10", "--task", "of_others")
    assert code != 0 and "of_others" in err and looked == [False, False, True]


@pytest.mark.slow
def test_rows_as_json(qattn):
    arguments = ("--task", "recall_10", "--limit", "1", "--method", "int8", "--max-new-tokens", "2", "--json")
    code, out, _ = qattn(*arguments)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == 1
    assert (rows[0]["method"], rows[0]["metric"], rows[0]["generated"]) == ("int8", "exact_match", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--task is missing"),
        (("--task", "recall_10", "--method", "turbos"), "did you mean 'turbo'"),
        (("--task", "recall_10", "--method", "full:bits=4"), "full precision has no settings"),
        (("--task", "recall_11"), "--task recall_11: no such task"),
        (("--task", "recall_10", "--data-dir", "nowhere"), "none of these is there"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(qattn, arguments, message):
    code, out, err = qattn(*arguments)
    assert code in (1, 2) and out == "" and message in err and err.startswith("qattn: ") and err.count("\n") == 1


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--task", "gsm8k"])
    assert ended.value.code == 1 and "pip install 'qattn-hf[eval]'" in capsys.readouterr().err


def launched(folder: Path, port: str, *arguments: str) -> None:
    """Start two processes as `accelerate launch` does."""
    program = folder / "ours.py"
    program.write_text(OURS)
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, str(program)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", *launch, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def forked_twice(folder: Path, port: str, *arguments: str) -> None:
    """Fork two processes with the variables that `accelerate launch` sets. Each would import all modules."""
    from accelerate.state import AcceleratorState

    def run() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # of this process without others
        sys.argv[1:] = arguments
        exec(OURS, {})

    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    said = [folder / "said-0", folder / "said-1"]
    children = [forked.start(run, said[i], RANK=str(i), LOCAL_RANK=str(i), **shared) for i in (0, 1)]
    for child, text in zip(children, said, strict=True):
        forked.wait(child, text)


@pytest.mark.parametrize("start", [forked_twice, pytest.param(launched, marks=pytest.mark.exhaustive)])
def test_lm_evals_command_line_runs_on_two_processes(tmp_path, start):
    """Over gloo: each answers half of the rows, the first writes one result."""
    pytest.importorskip("lm_eval", reason=WHY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = f"pretrained={demo_model_dir()},dtype=float32,method=turbo,k_bits=4,v_bits=2"
    model = ["--model", "qattn", "--model_args", arguments]
    tasks = ["--tasks", "recall_10", "--limit", "3", "--gen_kwargs", "max_gen_toks=6", "--output_path", str(tmp_path)]
    start(tmp_path, port, "run", *model, *tasks)
    (written,) = tmp_path.rglob("results_*.json")
    found = json.loads(written.read_text())
    ours = found["config"]["qattn"]
    assert (
        found["n-samples"]["recall_10"]["effective"] == 3
        and found["results"]["recall_10"]["exact_match,first-number"] == 1
    )
    assert ours["world_size"] == 2 and ours["tasks"]["recall_10"]["packed_requests"] == 2
    assert ours["recipe"]["v_bits"] == 2 and ours["mode"].startswith("through the packed cache")
