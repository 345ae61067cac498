"""Launches wait for a compilation of their kernel in another thread, and for no other."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from threading import Timer
from typing import Any

import pytest

from qattn_kernels.launch import launches


class Kernel:
    """A kernel that notes down its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))


@pytest.fixture(autouse=True)
def nothing_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_expected", {})
    monkeypatch.setattr(launches, "SILENT", 0.01)


def test_a_launch_waits_for_its_kernel_alone_and_says_so(caplog: pytest.LogCaptureFixture):
    compiled, other, kernel = Future(), Future(), Kernel()
    launches.expect(kernel, compiled)
    launches.expect(Kernel(), other)
    seen: list[int] = []
    Timer(0.1, lambda: (seen.append(len(kernel.launched)), compiled.set_result(None))).start()
    with caplog.at_level(logging.WARNING):
        launches.launch(kernel, (2,), 1, num_warps=4)
        launches.launch(kernel, (3,), 2)
    assert seen == [0] and [grid for grid, *_ in kernel.launched] == [(2,), (3,)] and not other.done()
    assert [record.getMessage().partition(" for ")[0] for record in caplog.records] == ["compiling 2 kernels"]


def test_a_compilation_that_fails_leaves_the_error_to_the_launch(caplog: pytest.LogCaptureFixture):
    compiled, kernel = Future(), Kernel()
    compiled.set_exception(RuntimeError("no compiler"))
    launches.expect(kernel, compiled)
    launches.launch(kernel, (1,))
    assert len(kernel.launched) == 1 and not caplog.records


def test_what_is_collected_is_not_launched():
    kernel = Kernel()
    found = launches.collected(lambda: launches.launch(kernel, (4,), 5, num_warps=1))
    assert found == [(kernel, (4,), (5,), {"num_warps": 1})] and not kernel.launched
    launches.launch(kernel, (4,), 5)
    assert len(kernel.launched) == 1
