"""The worked examples of docs/: the files that a page shows make a folder whose test passes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = re.compile(r"^Save this as `([\w/.]+)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = ROOT / "docs" / "add-a-method.md"


def files_of(page: Path) -> dict[str, str]:
    """The files that a page tells the reader to save, by name."""
    return dict(FILE.findall(page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_the_method_built_on_the_page_passes_its_test(tmp_path: Path):
    files = files_of(PAGE)
    assert sorted(files) == ["channel_keys.py", "test_channel_keys.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0 and "5 passed" in done.stdout, f"{done.stdout}\n{done.stderr}"


def test_page_and_notebook_show_the_same_method():
    notebook = json.loads((ROOT / "examples" / "adding_a_method.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    (shown,) = [source for source in sources if source.startswith("FILE = '''")]
    assert shown == f"FILE = '''{files_of(PAGE)['channel_keys.py']}'''"
