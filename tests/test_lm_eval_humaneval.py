"""HumanEval runs a model's code only with consent, and a model that answers from the data passes.

Its metric, `code_eval`, comes from the hub. A copy with the same behaviour is in the working directory, where evaluate
looks first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")

import evaluate
from lm_eval.evaluator import evaluate as score_tasks
from test_lm_eval_tasks import Oracle, made, real, task_manager

from qattn_hf.lm_eval.local import task_folders

METRIC = """
import math
import subprocess
import sys
import datasets
import evaluate

class CodeEval(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Sequence(datasets.Value("string")),
                                      "references": datasets.Value("string")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, k):
        passed = {f"pass@{one}": [] for one in k}
        for candidates, test in zip(predictions, references):
            codes = [subprocess.run([sys.executable, "-c", f"{code}\\n{test}"], capture_output=True).returncode
                     for code in candidates]
            n, wrong = len(codes), sum(code != 0 for code in codes)
            for one in (one for one in k if one <= n):
                passed[f"pass@{one}"].append(1 - math.comb(wrong, one) / math.comb(n, one))
        return {name: sum(found) / len(found) for name, found in passed.items() if found}, {}
"""


@pytest.fixture(params=["made", pytest.param("real", marks=pytest.mark.slow)])
def score(request, tmp_path, monkeypatch) -> Callable[..., dict[str, float]]:
    """The scores of a task of HumanEval for what `say` makes of a row."""
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "code_eval").mkdir()
    (tmp_path / "code_eval" / "code_eval.py").write_text(METRIC)
    data = made(tmp_path / "data") if request.param == "made" else real()
    monkeypatch.chdir(tmp_path)

    def run(name: str, say: Callable[[str, dict, str], str], consent: bool = True) -> dict[str, float]:
        with task_folders(data) as folders:
            manager = task_manager(folders)
            tasks = manager.load([name])["tasks"]
            found: Any = score_tasks(
                Oracle(tasks, say),
                manager.load([name]),
                limit=2,
                bootstrap_iters=0,
                log_samples=False,
                confirm_run_unsafe_code=consent,
            )
        return {key.split(",")[0]: value for key, value in found["results"][next(iter(tasks))].items()}

    return run


def solution(task: str, row: dict[str, Any], target: str) -> str:
    return row["canonical_solution"]


@pytest.mark.slow
def test_right_programs_pass_and_wrong_ones_do_not(score):
    assert score("qattn_humaneval", solution)["pass@1"] == 1
    assert score("qattn_humaneval", lambda *_: "    return None and 0\n")["pass@1"] == 0


@pytest.mark.slow
def test_one_right_sample_of_ten(score):
    turn = itertools.count()

    def seldom(task: str, row: dict[str, Any], target: str) -> str:
        return solution(task, row, target) if next(turn) % 10 == 9 else "    return 'wrong'\n"

    found = score("qattn_humaneval_10", seldom)
    assert found["pass@1"] == pytest.approx(0.1) and found["pass@10"] == 1


@pytest.mark.slow
def test_nothing_runs_without_consent(score):
    with pytest.raises(ValueError, match="unsafe"):
        score("qattn_humaneval", solution, consent=False)
