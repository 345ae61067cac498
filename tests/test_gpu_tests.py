"""`eval/gpu_tests.py` on small folders of tests."""

from __future__ import annotations

import json

import pytest
from test_eval_scripts import script

gpu_tests = script("gpu_tests")
MARKED = """
import pytest

@pytest.mark.{mark}
@pytest.mark.large_memory
def test_large(): pass

@pytest.mark.{mark}
def test_small(): pass

def test_other(): raise AssertionError
"""  # the mark's name comes later: this file has no such test


@pytest.mark.slow
def test_gpu_tests_are_chosen_by_their_mark(tmp_path, monkeypatch, capfd):
    """Not by a file's name; tests that take much memory run too, after the others."""
    (tmp_path / "test_a.py").write_text(MARKED.format(mark="gpu"))
    (tmp_path / "test_cuda.py").write_text("import a_library_that_is_not_installed")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    large_memory\n")
    monkeypatch.setattr(gpu_tests.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="need a CUDA GPU"):
        gpu_tests.main([])
    monkeypatch.setattr(gpu_tests, "TESTS", tmp_path)
    monkeypatch.setattr(gpu_tests.torch.cuda, "is_available", lambda: True)
    for processes in ([], ["-n", "1"]):
        with pytest.raises(SystemExit) as ended:
            gpu_tests.main([*processes, "-c", str(tmp_path / "pytest.ini")])
        rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
        assert ended.value.code == 0, rows
        assert [row["test"] for row in rows] == ["test_small", "test_large"]


@pytest.mark.slow
def test_gpu_tests_go_on_after_a_run(tmp_path, monkeypatch, capfd):
    """In other processes too, which collect the tests themselves."""
    (tmp_path / "test_b.py").write_text(
        f"import pytest\npytestmark = pytest.mark.{'gpu'}\n"
        "@pytest.mark.parametrize('n', [1, 2, 11, 3])\ndef test_of(n): pass\ndef test_one(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    large_memory\n")
    ended = {"test_of[1]": "passed", "test_of[2]": "failed", "test_of[3]": "skipped", "test_one": "passed"}
    before = [{"file": "test_b", "test": name, "outcome": outcome} for name, outcome in ended.items()]
    (tmp_path / "record.json").write_text(json.dumps({"name": "gpu-tests", "runs": [{"run": "cut", "rows": before}]}))
    for name, value in (("ROOT", tmp_path), ("TESTS", tmp_path), ("RECORD", tmp_path / "record.json")):
        monkeypatch.setattr(gpu_tests, name, value)
    monkeypatch.setattr(gpu_tests.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        gpu_tests.main(["--after", "cut", "-n", "1", "-c", str(tmp_path / "pytest.ini")])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["test"] for row in rows] == ["test_of[2]", "test_of[11]", "test_one"]
    (tmp_path / "record.json").write_text(
        json.dumps({"name": "gpu-tests", "runs": [{"run": "cut", "rows": before}, {"run": "more", "rows": rows[:1]}]})
    )
    with pytest.raises(SystemExit):
        gpu_tests.main(["--after", "cut,more", "-n", "1", "-c", str(tmp_path / "pytest.ini")])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["test"] for row in rows] == ["test_of[11]", "test_one"]
    with pytest.raises(SystemExit, match="has the runs cut"):
        gpu_tests.main(["--after", "whole"])


@pytest.mark.slow
def test_a_failed_test_says_why(tmp_path, monkeypatch, capfd):
    """The record of a run that is cut has no other place for it."""
    (tmp_path / "test_c.py").write_text(
        f"import pytest\n@pytest.mark.{'gpu'}\ndef test_of():\n    raise RuntimeError('out of it')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    large_memory\n")
    monkeypatch.setattr(gpu_tests, "TESTS", tmp_path)
    monkeypatch.setattr(gpu_tests.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        gpu_tests.main(["-c", str(tmp_path / "pytest.ini")])
    (row,) = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert row["outcome"] == "failed" and row["error"] == "RuntimeError: out of it"
