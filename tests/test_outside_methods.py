"""Methods and formats of other packages: an entry point makes them known to `patch`, recipes and commands."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from helpers import tiny_llama

from qattn_hf import QAttnCache, QAttnError, list_methods, patch, report
from qattn_hf.cli import main
from qattn_hf.methods import ENTRY_POINTS, get_method
from qattn_hf.methods import _installed as installed
from qattn_kernels.formats import Format, get_format
from qattn_kernels.layer.spec import decode_spec

SHIFT8 = Path(__file__).resolve().parent.parent / "examples" / "shift8"

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


def run(*command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command])
    assert not ended.value.code, command


@pytest.fixture
def shift8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`examples/shift8` installed: its folder, and the metadata that an installer would write from its project file."""
    group, line = re.search(
        r'\[project\.entry-points\."(.+)"]\n(.+)\n', (SHIFT8 / "pyproject.toml").read_text()
    ).groups()
    metadata = tmp_path / "site" / "qattn_shift8-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: qattn-shift8\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n", encoding="utf-8")
    for folder in (SHIFT8, metadata.parent):
        monkeypatch.syspath_prepend(str(folder))
    installed.cache_clear()
    yield
    installed.cache_clear()


def test_commands_take_the_method_and_the_format_of_an_installed_package(shift8, capsys: pytest.CaptureFixture):
    run("methods", "shift8", "--json")
    [about] = json.loads(capsys.readouterr().out)["methods"]
    assert about["name"] == "shift8" and not about["kernels"]
    run("cache", "report", "--method", "shift8", "--tokens", "200", "--json")
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert {row["k_format"] for row in rows} == {"shift8"}


def test_a_cache_of_an_installed_format_is_saved_copied_and_encoded(shift8, tmp_path: Path):
    model = patch(tiny_llama(), method="shift8")
    spec = model._qattn.specs[0]
    assert decode_spec(spec.encode()) == spec and spec.k.name == "shift8"
    cache = QAttnCache.for_model(model)
    model(torch.arange(1, 91)[None], past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAttnCache.load(tmp_path / "cache.safetensors", model=model)
    step = torch.tensor([[7]])
    assert torch.equal(*(model(step, past_key_values=one).logits for one in (loaded, cache)))
    run("cache", "info", str(tmp_path / "cache.safetensors"))


def test_names_of_formats_are_not_taken_twice():
    with pytest.raises(TypeError, match=r"formats\.fp8\.reference has a format named 'fp8'"):

        @dataclass(frozen=True)
        class Another(Format):
            name = "fp8"

    with pytest.raises(ImportError):
        get_format("no_such_format")
