"""The notebooks in `examples/`: each runs from top to bottom, and holds no outputs of somebody's run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import rich.console
from helpers import random_ids, tiny_llama

from qattn_hf import patch, report

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NEEDED = ("nbmake", "ipykernel", "matplotlib", "lm_eval")
IN_CI = ("adding_a_format",)  # the first notebook runs above, other tests make the calls of the others
SECONDS = 300  # of one cell, on a busy machine


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_the_cells_of_the_first_notebook_run(tmp_path: Path):
    """One after another, in a forked process: they change the settings of libraries."""
    pytest.importorskip("matplotlib", reason="the notebook draws")

    def run() -> None:
        names: dict[str, Any] = {}
        for cell in cells(ROOT / "examples" / "quickstart.ipynb"):
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)

    forked.wait(forked.start(run, tmp_path / "said", MPLBACKEND="agg"), tmp_path / "said")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path if path.stem in IN_CI else pytest.param(path, marks=pytest.mark.exhaustive) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs_from_top_to_bottom(path: Path):
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"notebooks need {', '.join(missing)}: pip install 'qattn-hf[dev]'")
    # a separate session, so that running tests needs no plugin; it shows the cell that fails
    options = ["--nbmake", f"--nbmake-timeout={SECONDS}", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_no_outputs(path: Path):
    """Numbers come from the reader's own run; `make format` clears them."""
    run = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert run
    assert [cell["source"] for cell in run if cell["outputs"] or cell["execution_count"] is not None] == []
    assert [cell["source"] for cell in run if cell["metadata"]] == []  # as times of execution


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_takes_another_model(path: Path):
    first = next("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")
    assert first.startswith("MODEL = None")


def test_the_readme_names_every_notebook():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert NOTEBOOKS and [path.name for path in NOTEBOOKS if f"](examples/{path.name})" not in text] == []


def test_a_report_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch):
    """There rich shows what is printed by itself, even to a file."""
    model = patch(tiny_llama(), method="turbo")
    model.generate(random_ids(1, 100), max_new_tokens=2, do_sample=False)
    text = str(report(model))
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(report(model)) == text and "flashq 4" in text
