"""Launches wait for a compilation of their kernel in another thread, and for no other."""

from __future__ import annotations

import inspect
import logging
from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel

from qattn_kernels.launch import driver, launches, plan


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


class Compiled(CompiledKernel):
    """Triton's own compiled kernel, with a launcher that notes down grids, streams and arguments as a GPU would get
    them."""

    def __init__(self) -> None:
        kinds = "*u8", ("*fp32", ("*u8", "i32")), "*fp32", "*fp32", "i32", "constexpr"
        self.src = SimpleNamespace(signature=dict(enumerate(kinds)))
        self.name, self.function, self.packed_metadata, self.metadata = "kernel", "function", ("metadata",), None
        self.module = self._module_pid = 1  # it counts as loaded, by another process
        self.launched: list[tuple[Any, ...]] = []

        def launcher(x, y, z, stream, function, metadata, told, before, behind, *arguments):
            assert (function, metadata) == ("function", ("metadata",))
            for hook in (before, behind):
                if hook is not None:
                    hook(told)
            self.launched.append(((x, y, z), stream, *arguments))

        self._run = launcher


class Function:
    """A Triton function: a launch returns what was compiled."""

    def __init__(self) -> None:
        self.compiled = Compiled()

        def parameters(state: Any, pair: Any, x: Any, out: Any, n: int, SIZE: int = 8) -> None: ...

        self.signature = inspect.signature(parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.compiled


@pytest.mark.parametrize("hook", [None, "launch_enter_hook", "launch_exit_hook"])
def test_a_plan_gives_compiled_kernels_the_addresses_of_its_call(hook: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "driver", lambda: None)  # else it would launch in place of Triton: `test_driver.py`
    kernel, seen = Function(), list[Any]()

    def call(arena: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        out, room = torch.empty(4, 2), torch.empty(3)
        launches.launch(kernel, (5,), arena[16:24], (room, (arena[8:], 7)), x, out, 3, num_warps=4)
        return [out.transpose(0, 1)]

    arena, x = torch.zeros(64, dtype=torch.uint8), torch.ones(6)
    results, recorder = launches.recorded(lambda: call(arena, x))
    made = plan._plan(recorder, (arena, x), results)
    assert made.results == [(torch.Size([2, 4]), (1, 2), torch.float32)] and made.temporary == plan.ALIGNMENT
    for state, given in ((1000, 20), (1000, 30), (5000, 40)):
        if hook is not None and given == 30:  # a profiler begins to listen
            getattr(knobs.runtime, hook).add(seen.append)
        made._launch([state, given, given + 1, given + 2], stream=9)
    if hook is not None:
        getattr(knobs.runtime, hook).remove(seen.append)
        assert [told.get()["name"] for told in seen] == ["kernel", "kernel"]
    grids, streams, *arguments = zip(*kernel.compiled.launched, strict=True)
    assert grids == ((5, 1, 1),) * 3 and streams == (9, 9, 9)
    assert list(zip(*arguments, strict=True)) == [
        (1016, (22, (1008, 7)), 20, 21, 3, 8),
        (1016, (32, (1008, 7)), 30, 31, 3, 8),
        (5016, (42, (5008, 7)), 40, 41, 3, 8),
    ]


def test_no_plan_for_what_belongs_to_no_call():
    kernel, foreign, arena = Function(), torch.ones(3), torch.zeros(64, dtype=torch.uint8)

    def call() -> list[torch.Tensor]:
        out = torch.empty(3)
        launches.launch(kernel, (1,), arena, foreign, out, out, 1)
        return [out]

    results, recorder = launches.recorded(call)
    with pytest.raises(plan.Unplannable, match="no tensor of the call"):
        plan._plan(recorder, (arena,), results)


def test_keys_are_worked_out_from_what_is_called_upwards():
    """Whichever function comes first, so that all processes find the same keys."""
    order: list[str] = []

    class Function:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

        @property
        def cache_key(self) -> str:
            order.append(self.fn.__name__)
            return ""

    names: dict[str, Any] = {}
    for text in ("def leaf(): pass", "def middle(): leaf()", "def top(): middle(), leaf(), other"):
        exec(text, names)
    names.update({name: Function(names[name]) for name in ("leaf", "middle", "top")}, other=1)
    launches.settle_key(names["top"])
    launches.settle_key(names["middle"])
    assert order == ["leaf", "middle", "top"]
