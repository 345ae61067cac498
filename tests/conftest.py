"""Without a GPU Triton's kernels run in its interpreter. Triton asks for that when it is imported, which other
libraries may do first, so it is settled before any test module; so is the number of threads of each test process."""

import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is not None:  # processes beside one another: with all cores each, they wait for one another
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import torch  # noqa: E402 - reads these once

launches: list[str] = []  # of kernels, in the interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import bounds

    bounds.install(launches)
elif WORKER is not None:  # they share out the GPUs
    torch.cuda.set_device(int(WORKER.removeprefix("gw")) % torch.cuda.device_count())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many sets of parameters one set is in the first tier and the others are `slow`: of those marked
    `product`, and of all below `kernels/` and `conformance/`, which ask each thing of many settings. It is another set
    for each test, or the one with the id that the mark names, where some are much cheaper: `product("quickstart")`."""
    products: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        without_gpu = [mark for mark in item.iter_markers("skipif") if mark.args[0] is True]
        if not without_gpu and (item.path.parent != Path(__file__).parent or item.get_closest_marker("product")):
            products[item.nodeid.partition("[")[0]].append(item)
    for name, sets in products.items():
        named = (item for item in sets for mark in item.iter_markers("product") if item.callspec.id in mark.args)
        first = next(named, sets[zlib.crc32(name.encode()) % len(sets)])
        for item in sets:
            if item is not first:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def kernels_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that runs kernels runs on GPUs too: it has the mark by which `eval/gpu_tests.py` chooses."""
    launches.clear()
    yield
    if launches and request.node.get_closest_marker("gpu") is None:
        pytest.fail(f"this test ran the kernel {launches[0]}: give it the mark `gpu`", pytrace=False)


@pytest.fixture(autouse=True)
def compiled_code_is_dropped() -> Iterator[None]:
    """Dynamo keeps eight variants of a function: with those of other tests the limit would be met by whichever comes
    last."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Runs a test under `torch.no_grad()`, as users call a model for its answers."""
    with torch.no_grad():
        yield


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

    from qattn_hf.cuda_graph import capture, graph

    found = FakeGraphs()
    monkeypatch.setattr(graph, "record", found.record)
    monkeypatch.setattr(capture, "why_not", lambda model: None)
    return found
