"""Hostile cache files: loading one gives a clear error, or a cache that computes.

The digests in these files are valid, because an attacker writes them as well. A wrong number that kernels trusted would
crash the interpreter, so each run has a separate process. `QATTN_FILES=2000` tries that number of changes of each kind.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
import torch
from helpers import random_ids, tiny_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from small_types import tiny
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, QAttnError, patch
from qattn_hf.saved import read_header
from qattn_hf.saved.checks import geometry_of
from qattn_kernels.layer.arena import Layout, views
from qattn_kernels.layer.spec import decode_spec

pytestmark = pytest.mark.usefixtures("no_grad")

EXAMPLES = os.environ.get("QATTN_FILES")
REF = {"impl": "reference"}
KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "turbo": lambda: patch(tiny_llama(), "turbo", **REF),
    "heads of different bits": lambda: patch(tiny_llama(), "turbo", bits="mixed", **REF),
    "kivi": lambda: patch(tiny_llama(), "kivi", **REF),
    "sinks": lambda: patch(tiny_llama(), "sinkq", **REF),
    "packed window": lambda: patch(tiny("gemma2"), "turbo", family=False, sliding="packed", **REF),
    "unpacked window": lambda: patch(tiny("gemma2"), "turbo", family=False, sliding="exact", **REF),
    "unpacked states": lambda: patch(tiny("falcon_h1"), "turbo", family=False, **REF),
    "kernels": lambda: patch(tiny_llama(head_dim=64, num_hidden_layers=1), "turbo", impl="triton"),
}


class Honest(NamedTuple):
    """A file as it was saved."""

    model: PreTrainedModel
    header: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    path: Path

    def write(self, header: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Write a file of this header and these tensors, whose digests fit."""
        if isinstance(header, dict) and isinstance(header.get("digests"), dict) and tensors is not self.tensors:
            header["digests"] = {name: digest(tensor) for name, tensor in tensors.items()}
        text = header if isinstance(header, str) else json.dumps(header)
        metadata = {"qattn": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        save_file(tensors, self.path, metadata)

    def read(self) -> str:
        """Load the file and go on with it; in which way that ended."""
        try:
            cache = QAttnCache.load(self.path, model=self.model)
        except QAttnError as error:
            assert str(self.path) in str(error) and len(str(error)) < 4000
            return "refused"
        rows = self.header["rows"]
        for tokens in (1, 40):
            out = self.model(random_ids(rows, tokens), past_key_values=copy.deepcopy(cache)).logits
            assert bool(out.isfinite().all())
        try:
            cache.crop(-3)
        except QAttnError:
            return "went on"  # of a state that cannot be put back
        assert bool(self.model(random_ids(rows, 1), past_key_values=cache).logits.isfinite().all())
        return "went on"


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def honest(kind: str, folder: Path) -> Honest:
    model = KINDS[kind]()
    path = folder / "prefix.safetensors"
    ids = random_ids(2, 150)
    model(ids).past_key_values.save(path, input_ids=ids)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    return Honest(model, read_header(path), tensors, path)


def contained(run: Callable[[Callable[[str], Any]], Any], folder: Path) -> None:
    """Run in a separate process, which may crash. `run` receives a function that notes its current example."""

    def noted() -> None:
        signal.alarm(550 if EXAMPLES else 60)
        run(partial(print, flush=True))

    forked.wait(forked.start(noted, folder / "said"), folder / "said")


quick = settings(
    max_examples=int(EXAMPLES or 10), deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 63, 64, 65, 150, 2**15, 2**20, 2**30, 2**31 - 1, -(2**31)]


# Numbers of the state

# numbers that nothing is found by: how many tokens were not finite, or clamped, or skipped; how long a row ever was
COUNTS = ("nonfinite", "clamped", "longest")


FEW = ("turbo", "sinks", "packed window", "unpacked states")  # in the first tier; `kernels` have a test below
STATES = [pytest.param(x, marks=() if x in FEW else pytest.mark.slow) for x in KINDS if x != "kernels"]


@pytest.mark.parametrize("kind", STATES)
def test_numbers_of_a_state_that_lie(kind: str, tmp_path: Path):
    lie_about_states(honest(kind, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that was forked cannot use CUDA")
def test_numbers_of_a_state_that_lie_to_kernels(tmp_path: Path):
    lie_about_states(honest("kernels", tmp_path), tmp_path)


def lie_about_states(file: Honest, folder: Path) -> None:
    places = []  # of each number that locates something
    for i, row in enumerate(file.header["layers"]):
        if "geometry" in row:
            layout = Layout(geometry_of(row), decode_spec(row["spec"]))
            state = views(file.tensors[f"{i}.arena"], layout)
            whole = (torch.int32, torch.int64)
            places += [(i, layout, name) for name, x in state.items() if x.dtype in whole and x.numel()]

    @quick
    @given(st.data())
    def play(data: st.DataObject) -> None:
        tensors = {name: tensor.clone() for name, tensor in file.tensors.items()}
        told = []
        for _ in range(data.draw(st.sampled_from([1, 1, 2, 3]))):
            i, layout, name = data.draw(st.sampled_from(places))
            numbers = views(tensors[f"{i}.arena"], layout)[name].view(-1)
            value = data.draw(st.one_of(st.sampled_from(NUMBERS), st.integers(-70, 70).map(lambda x: ("by", x))))
            at = data.draw(st.one_of(st.none(), st.integers(0, len(numbers) - 1)))
            part = numbers if at is None else numbers[at : at + 1]
            part.add_(value[1]) if isinstance(value, tuple) else part.fill_(value)
            told.append((i, name, at, value))
        note(str(told))
        file.write(copy.deepcopy(file.header), tensors)
        file.read()

    def run(say: Callable[[str], Any]) -> None:
        nonlocal note
        note = say
        play()
        for i, layout, name in {place[2]: place for place in places}.values():
            for value in (-1, 2**20):  # each number out of bounds
                tensors = {**file.tensors, f"{i}.arena": file.tensors[f"{i}.arena"].clone()}
                views(tensors[f"{i}.arena"], layout)[name].fill_(value)
                note(f"{name} of layer {i}: {value}")
                file.write(copy.deepcopy(file.header), tensors)
                assert name.split(".")[-1] in COUNTS or file.read() == "refused"

    note: Callable[[str], Any] = str
    contained(run, folder)


# Fields of the header

VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**30, 0.5, 1e300, "", "x", "../x", [], {}, [[]]]),
    st.sampled_from(["float32", "float64", "nn", "0" * 64, "a: &a [*a]", "[" * 5000, "x" * 10**6]),
)


def fields(value: Any, at: tuple = ()) -> list[tuple]:
    """The place of everything in a header, itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inner for place in fields(part, (*at, key)))]


def changed(header: Any, place: tuple, value: Any, how: str) -> Any:
    if not place:
        return value
    owner = header
    for key in place[:-1]:
        owner = owner[key]
    if how == "drop":
        del owner[place[-1]]
    elif how == "add" and isinstance(owner, dict):
        owner["more"] = value
    else:
        owner[place[-1]] = value
    return header


@pytest.mark.parametrize("kind", ["turbo", "unpacked window", "unpacked states"])
def test_headers_of_other_types_and_bounds(kind: str, tmp_path: Path):
    file = honest(kind, tmp_path)
    places = [place for place in fields(file.header) if "config" not in place]
    inside = [i for i, row in enumerate(file.header["layers"]) if "spec" in row]

    def run(say: Callable[[str], Any]) -> None:
        @quick
        @given(st.sampled_from(places), VALUES, st.sampled_from(["set", "drop", "add"]))
        def play(place: tuple, value: Any, how: str) -> None:
            say(str((place, str(value)[:200], how)))
            file.write(changed(copy.deepcopy(file.header), place, value, how), file.tensors)
            file.read()

        @quick
        @given(st.data(), VALUES, st.sampled_from(["set", "drop", "add"]))
        def play_spec(data: st.DataObject, value: Any, how: str) -> None:
            header = copy.deepcopy(file.header)
            row = header["layers"][data.draw(st.sampled_from(inside))]
            spec = json.loads(row["spec"])
            place = data.draw(st.sampled_from(fields(spec)))
            say(str((place, str(value)[:200], how)))
            row["spec"] = json.dumps(changed(spec, place, value, how))
            file.write(header, file.tensors)
            file.read()

        play()
        play_spec()

    contained(run, tmp_path)


# Tensors


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shorter": lambda x: x[: len(x) // 2],
    "longer": lambda x: torch.cat([x, x]),
    "of no rows": lambda x: x[:0],
    "of a dimension more": lambda x: x[None],
    "flat": lambda x: x.reshape(-1),
    "of another dtype": lambda x: x.to(torch.int16),
    "of bytes": lambda x: x.contiguous().reshape(-1).view(torch.uint8),
    "of fewer channels": lambda x: x[..., : x.shape[-1] // 2],
    "of fewer tokens": lambda x: x[..., : x.shape[-2] // 2, :] if x.dim() > 1 else x[:1],
    "of a number": lambda x: x.reshape(-1)[0],
}


@pytest.mark.parametrize("kind", ["turbo", "unpacked window", "unpacked states"])
def test_tensors_of_other_shapes(kind: str, tmp_path: Path):
    file = honest(kind, tmp_path)

    def run(say: Callable[[str], Any]) -> None:
        for name in file.tensors:
            for shape, change in SHAPES.items():
                tensors = {**file.tensors, name: change(file.tensors[name]).clone()}
                if (tensors[name].dtype, tensors[name].shape) == (file.tensors[name].dtype, file.tensors[name].shape):
                    continue
                say(f"{name} {shape}")
                file.write(copy.deepcopy(file.header), tensors)
                states = "states" in name  # the model's code checks their channels
                with pytest.raises((QAttnError, RuntimeError, ValueError) if states else QAttnError):
                    assert file.read() == "refused"
                    raise QAttnError
        for name in ("9.arena", "0.x", "x", "0.keys.0", "offset.x", "0.conv_states.7"):
            say(name)
            file.write(copy.deepcopy(file.header), {**file.tensors, name: torch.zeros(2, 3)})
            assert file.read() == "refused"

    contained(run, tmp_path)


# Places


def test_what_is_no_file_is_an_error_in_words(tmp_path: Path):
    model = patch(tiny_llama(), "turbo", **REF)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "empty", "/dev/null", "a\0b", "x" * 5000, None):
        with pytest.raises(QAttnError):
            QAttnCache.load(path, model=model)
        with pytest.raises(QAttnError):
            read_header(path)
    with pytest.raises(FileNotFoundError):
        QAttnCache.load(tmp_path / "none", model=model)


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 10**5, "{}", '{"format": "3"}', '{"format": 3}', "1" * 10**5])
def test_a_header_that_is_none_is_an_error_in_words(text: str, tmp_path: Path):
    metadata = {"qattn": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    save_file({"x": torch.zeros(1)}, tmp_path / "x", metadata)
    with pytest.raises(QAttnError, match="Save the cache anew"):
        read_header(tmp_path / "x")


def test_where_no_file_can_be_written_is_an_error_in_words(tmp_path: Path):
    ids = random_ids(1, 70)
    model = patch(tiny_llama(), "turbo", **REF)
    cache = model(ids).past_key_values
    for path in (tmp_path, tmp_path / "no" / "x", tmp_path / ("n" * 300), "a\0b", None):
        with pytest.raises(QAttnError):
            cache.save(path)
    for tokens in (ids.tolist(), ids.float()):
        with pytest.raises(QAttnError, match="tensor of whole numbers"):
            cache.save(tmp_path / "x", input_ids=tokens)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_in_words_and_leaves_the_old_file(tmp_path: Path):
    model = patch(tiny_llama(), "turbo", **REF)
    cache = model(random_ids(2, 150)).past_key_values
    cache.save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()

    def run(say: Callable[[str], Any]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        say("")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(QAttnError, match="cannot be written"):
            cache.save(tmp_path / "x")

    contained(run, tmp_path)
    assert (tmp_path / "x").read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {"x", "said"}


def test_a_file_has_the_rights_of_any_new_file(tmp_path: Path):
    model = patch(tiny_llama(), "turbo", **REF)
    cache = model(random_ids(1, 70)).past_key_values
    before = os.umask(0o027)
    try:
        cache.save(tmp_path / "x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_header_and_tensors_are_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is replaced by another one, of other lengths, once its header was read."""
    model = patch(tiny_llama(), "turbo", **REF)
    for name, tokens in (("x", 150), ("y", 250)):
        model(random_ids(2, tokens)).past_key_values.save(tmp_path / name)
    checked = QAttnCache.load(tmp_path / "x", model=model)
    import qattn_hf.saved as saved

    real = saved.checked_specs

    def swapped(*args: Any) -> Any:
        os.replace(tmp_path / "y", tmp_path / "x")
        return real(*args)

    monkeypatch.setattr(saved, "checked_specs", swapped)
    loaded = QAttnCache.load(tmp_path / "x", model=model, verify=False)
    assert int(loaded.get_seq_length()) == 150
    assert all(torch.equal(a.arena, b.arena) for a, b in zip(loaded.layers, checked.layers, strict=True))
