"""Set up Triton's interpreter and the threads of each test process before any test module is imported.

Without a GPU, kernels run in the interpreter. Triton decides that when it is imported, and other libraries may import
it first.
"""

import atexit
import functools
import gc
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is not None:  # parallel processes would wait for each other if each used all cores
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, and nothing waits for a hub out of reach
os.environ["QATTN_TUNED"] = os.devnull  # tiles that were measured on this machine are not what tests expect
gc.disable()  # until all modules are imported: nothing of them is garbage

import torch  # noqa: E402 - reads these once
from torch.utils._device import _device_constructors  # noqa: E402

# Torch keeps this set from its first use on. In a test that replaces `torch.empty`, the set would lack the real one.
_device_constructors()

typer.main.get_command = functools.cache(typer.main.get_command)  # each call of `qattn` would build all commands

FEW = 6  # sets of parameters of a test below `kernels/` that runs none: the first tier has them all
MANY = 12  # sets of parameters of a test that is no product: above it the first tier has some
MOST = 4  # sets of parameters of a product in the slow tier
MOST_OF_KERNELS = 1  # the same of a test marked `gpu`: the interpreter is slow, and GPUs run all sets
MODULES = 50  # imports of a file's tests that are worth one garbage collection
launches: list[str] = []  # of kernels, in the interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import bounds
    import interpreter

    interpreter.install()
    bounds.install(launches)
elif WORKER is not None:  # they share out the GPUs
    torch.cuda.set_device(int(WORKER.removeprefix("gw")) % torch.cuda.device_count())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most sets of parameters of a test `slow`, and many of these `exhaustive`. Some stay in the first tier.

    Products are the tests marked `product`, and all tests below `kernels/` and `conformance/`, which check many
    settings. The first tier keeps one set for each kind of format (`kind_of`). Tests of kernels are slow in the
    interpreter and keep one set in all; tests below `kernels/` without kernels keep up to `FEW`. A hash of the test's
    name chooses among equals. `product("quickstart")` names the set instead, if some sets are much cheaper.

    The slow tier covers other values of each parameter (`values_of`), in at most `MOST` sets, or `MOST_OF_KERNELS` for
    kernels; `product(most=1)` names another number. A test of kernels that is itself marked `slow` has only the set
    that the first tier would keep. Hashes of names give each test different parts of a longer list. The rest of a
    product is `exhaustive`, which implies `slow`.

    Any other test of more than `MANY` sets keeps sets in the first tier until each value of each parameter is covered.
    The rest is `slow`.
    """
    tests: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if not any(mark.args[0] is True for mark in item.iter_markers("skipif")):  # what runs without a GPU
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, sets in tests.items():
        if sets[0].path.parent != Path(__file__).parent or sets[0].get_closest_marker("product"):
            named = [item for item in sets for mark in item.iter_markers("product") if item.callspec.id in mark.args]
            kept = named[:1] or [choice[zlib.crc32(name.encode()) % len(choice)] for choice in _choices(sets)]
            second = _new(sets, kept)[: _most(sets[0])]
        else:
            kept, second = (_new(sets, []) if len(sets) > MANY else sets), sets
        for item in sets:
            if item not in kept:
                item.add_marker(pytest.mark.slow if item in second else pytest.mark.exhaustive)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what is imported out of all garbage collections of the tests, and of those of pytest at its end."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # libraries in C++ look for what is left at the end of the process


def _most(item: pytest.Item) -> int:
    """Sets of parameters of a product in the slow tier, in addition to those that the first tier would keep."""
    said = [mark.kwargs["most"] for mark in item.iter_markers("product") if "most" in mark.kwargs]
    if said or not item.get_closest_marker("gpu"):
        return said[0] if said else MOST
    return 0 if item.get_closest_marker("slow") else MOST_OF_KERNELS  # what the first tier would keep is slow then


def _choices(sets: list[Any]) -> list[list[Any]]:
    """Group the sets of parameters of a test by kind of format. Sets of a test of kernels are one group."""
    if sets[0].get_closest_marker("gpu"):
        return [sets]
    if sets[0].path.parent.name == "kernels" and len(sets) <= FEW:
        return [[item] for item in sets]
    kinds: defaultdict[str, list[Any]] = defaultdict(list)
    for item in sets:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        kinds[next((kind_of(value) for value in given if is_case(value)), "")].append(item)
    return list(kinds.values())


def _new(sets: list[Any], kept: list[Any]) -> list[Any]:
    """Sets of parameters that meet what `kept` does not: those with most new values first, the highest hash of the name
    among equals."""
    values = {item: values_of(item) for item in sets}
    rest = sorted((item for item in sets if item not in kept), key=lambda item: -zlib.crc32(item.nodeid.encode()))
    seen = {value for item in kept for value in values[item]}
    found: list[Any] = []
    while rest:
        best = max(rest, key=lambda item: len(values[item] - seen))
        if values[best] <= seen:
            break
        seen |= values[best]
        rest.remove(best)
        found.append(best)
    return found


def values_of(item: Any) -> set[tuple[str, str]]:
    """The values of all parameters of a test. Methods with settings count as one where their formats are of one
    kind."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, _told(item.callspec, name)) for name in given}


def _told(callspec: Any, name: str) -> str:
    """Return a parameter's value as text that all processes agree on.

    The text of a function has its address, so its index is used instead.
    """
    value = callspec.params[name]
    if is_case(value):
        return kind_of(value)
    words = repr(value)
    return f"value {callspec.indices[name]}" if " at 0x" in words else words


def kind_of(case: Any) -> str:
    """Return how a method with its settings stores keys of an open block: in a ring of INT8 codes, in an unquantized
    ring, or in the blocks without a ring. Settings that the method refuses are a separate kind."""
    from qattn_hf.methods import get_method

    try:
        keys, _ = get_method(case[0])(**case[1]).formats(0, 2, 2)
    except ValueError:
        return repr(case)
    return ("codes" if keys.integer else "numbers") if keys.windowed else "no ring"


def is_case(value: Any) -> bool:
    """Whether a parameter is a method's name with its settings."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict)):
        return False
    return _is_method(value[0])


@functools.cache
def _is_method(name: str) -> bool:
    from qattn_hf.methods import is_method

    return is_method(name)


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> Iterator[None]:
    """Leave what the tests of a file have imported out of the garbage collections of later files.

    Transformers collects all garbage after each batch of requests, and looks through every module then."""
    known = len(sys.modules)
    yield
    if len(sys.modules) > known + MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def kernels_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test that runs kernels has the mark `gpu`, which `eval/gpu_tests.py` selects."""
    launches.clear()
    yield
    if launches and request.node.get_closest_marker("gpu") is None:
        pytest.fail(f"this test ran the kernel {launches[0]}: give it the mark `gpu`", pytrace=False)


@pytest.fixture(autouse=True)
def compiled_code_is_dropped() -> Iterator[None]:
    """Drop compiled code between tests.

    Dynamo keeps eight variants of a function, and other tests' variants would exhaust the limit.
    """
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Runs a test under `torch.no_grad()`, as users call a model for its answers."""
    with torch.no_grad():
        yield


@pytest.fixture
def qattn(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process: `(exit code, stdout, stderr)`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        from qattn_hf.cli import main

        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def stock() -> Any:
    """A tiny Llama that nobody patched, fresh for each test."""
    from refusals import tiny

    return tiny()


@pytest.fixture
def patched() -> Any:
    """A tiny Llama patched with `turbo`; another model than `stock`."""
    from refusals import tiny

    from qattn_hf import patch

    return patch(tiny(), "turbo")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every model can be captured, and CUDA graphs are `FakeGraphs`."""
    from fake_graphs import FakeGraphs

    from qattn_hf.generate.cuda_graph import capture, graph

    found = FakeGraphs()
    monkeypatch.setattr(graph, "record", found.record)
    monkeypatch.setattr(capture, "why_not", lambda model: None)
    return found
