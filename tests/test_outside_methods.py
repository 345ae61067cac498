"""Methods of other packages: an entry point makes them known to `patch`, recipes and commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from helpers import tiny_llama

from qattn_hf import QAttnError, list_methods, patch, report
from qattn_hf.cli import main
from qattn_hf.methods import ENTRY_POINTS, get_method
from qattn_hf.methods import _installed as installed

MODULE = '''
from qattn_hf.methods.int8 import METHOD as INT8


class Outside(INT8):
    """INT8 under another name."""
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with the module `outside_method` and one entry point."""
    (tmp_path / "outside_method.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def installing(name: str, value: str) -> None:
        points = [EntryPoint(name, value, ENTRY_POINTS)]
        monkeypatch.setattr("qattn_hf.methods.entry_points", lambda group: points if group == ENTRY_POINTS else [])
        installed.cache_clear()

    yield installing
    installed.cache_clear()
    sys.modules.pop("outside_method", None)


def test_an_entry_point_is_a_method_like_any_other(install: Callable[[str, str], None], capsys: pytest.CaptureFixture):
    install("outside_method", "outside_method:Outside")
    assert "outside_method" in list_methods()
    model = patch(tiny_llama(), method="outside_method")
    tokens = torch.arange(1, 90)[None]
    found = model.generate(tokens, do_sample=False, max_new_tokens=4)
    assert report(model).to_dict()["packed_tokens"] > 0
    assert torch.equal(found, patch(tiny_llama(), method="int8").generate(tokens, do_sample=False, max_new_tokens=4))
    with pytest.raises(SystemExit) as ended:
        main(["methods"])
    assert not ended.value.code and "outside_method" in capsys.readouterr().out


def test_an_entry_point_cannot_replace_a_method(install: Callable[[str, str], None]):
    install("int8", "outside_method:Outside")
    assert list_methods().count("int8") == 1 and get_method("int8").__name__ != "Outside"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("outside_method", "pathlib:Path", "is no subclass of Method in a module outside_method"),
        ("another", "outside_method:Outside", "is no subclass of Method in a module another"),
        ("outside_method", "no_such_module:Outside", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_what_is_no_method_of_that_name_is_refused(
    install: Callable[[str, str], None], name: str, value: str, said: str
):
    install(name, value)
    with pytest.raises(QAttnError, match=f"{name} = .*{said}"):
        get_method(name)
