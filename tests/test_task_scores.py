"""`eval/task_scores.py`: rows of units, and agreement with full precision's answers of another process."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
from test_eval_scripts import script

from qattn_hf.assets import demo_model_dir

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")

from qattn_hf.lm_eval.agreement import Answer

task_scores = script("task_scores")
FOLDER = str(demo_model_dir())
USAGE = {"requests": 2, "packed_requests": 2, "effective_bits": 4.0, "tokens": 100, "generated": 8, "seconds": 1.5}


@pytest.mark.slow
def test_a_unit_is_measured_and_agrees_with_itself(monkeypatch):
    recall = task_scores.Task("recall_40", "exact_match", "first-number", 4, 8)
    monkeypatch.setitem(task_scores.TASKS, "recall", recall)
    full, packed = (
        task_scores.measure(task_scores.Unit(FOLDER, "recall", setting, 4, None)) for setting in ("full", "int8")
    )
    row = task_scores.row_of(task_scores.Unit(FOLDER, "recall", "int8", 4, None), packed, full)
    assert row["questions"] == 4 and row["score"] >= 0.75 and row["stderr"] is not None
    assert row["agrees"] >= 0.75 and row["packed"] == 4 and 8 < row["bits"] < 9
    assert row["model"] == "demo_model" and json.dumps(row)
    alone = task_scores.row_of(task_scores.Unit(FOLDER, "recall", "full", 4, None), full, None)
    assert "agrees" not in alone and alone["bits"] is None


def bbh(answers):
    """A unit of a group with two subtasks, whose rows in each are answered so."""
    rows = [
        {"task": name, "metric": "exact_match", "filter": "get-answer", "value": 0.5, "stderr": 0.1} for name in "ab"
    ]
    group = {**rows[0], "task": "bbh_cot_fewshot", "value": 0.25}
    found = {(task, "get-answer", n): Answer([said], None) for (task, n), said in answers.items()}
    return task_scores.Measured([{**row, **USAGE} for row in rows] + [group], found, 2.0)


def test_answers_of_a_group_are_those_of_its_subtasks():
    full = bbh({("a", 0): "1", ("a", 1): "2", ("b", 0): "3", ("b", 1): "[invalid]"})
    own = bbh({("a", 0): "1", ("a", 1): "3", ("b", 0): "2", ("b", 1): "[invalid]"})
    row = task_scores.row_of(task_scores.Unit("folder", "bbh", "turbo", None, None), own, full)
    assert row["score"] == 0.25 and row["questions"] == 4  # the group's score, not a subtask's
    assert row["agrees"] == pytest.approx(1 / 3, abs=1e-4), "of the three questions that one of both answers"
    assert row["both_unanswered"] == 1 and row["unanswered"] == 0.25
    assert row["packed"] == 4 and row["model_seconds"] == 3.0 and row["bits"] == 4.0


def test_an_answer_that_one_of_both_lacks_is_a_difference():
    full, own = bbh({("a", 0): "1", ("a", 1): "[invalid]"}), bbh({("a", 0): "[invalid]", ("a", 1): "1"})
    row = task_scores.row_of(task_scores.Unit("folder", "bbh", "turbo", None, None), own, full)
    assert row["agrees"] == row["both_unanswered"] == 0 and row["unanswered"] == 0.5
    row = task_scores.row_of(task_scores.Unit("folder", "bbh", "turbo", None, None), bbh({("a", 1): "[invalid]"}), full)
    assert "agrees" not in row and row["unanswered"] == 1, "no question is left to compare"


def test_rows_wait_for_full_precision_and_a_failed_unit_says_why(monkeypatch, capsys):
    class Pool:
        def __init__(self, *given, **options):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *ended):
            pass

        def submit(self, call, unit):
            future = Future()
            if unit.setting == "low2":
                future.set_exception(ValueError("no room"))
            else:
                future.set_result(bbh({("a", 0): "1", ("b", 0): unit.setting}))
            return future

    monkeypatch.setattr(task_scores, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(task_scores, "as_completed", lambda futures: reversed(list(futures)))  # full comes last
    options = task_scores.parsed(["folder=bbh", "--settings", "turbo;low2;full"])
    units = task_scores.units_of(options)
    assert [unit.setting for unit in units] == ["full", "turbo", "low2"]
    assert task_scores.print_rows(units, 1) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["setting"] for row in rows] == ["low2", "turbo", "full"]
    assert rows[0]["error"] == "ValueError: no room" and rows[1]["agrees"] == 0.5 and "agrees" not in rows[2]


def test_an_unknown_task_is_refused():
    with pytest.raises(SystemExit, match="no task 'mmlu'; there are gsm8k"):
        task_scores.main(["folder=mmlu"])
