"""Memory that runs out at one allocation or launch of a call after another; an interrupt at one line after another."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qattn_kernels.step import operator


class Failing(TorchDispatchMode):
    """Context in which the `at`-th operation that allocates a tensor raises `error`.

    Operations inside a packed layer's operator count, but not those inside interpreted kernels.
    """

    def __init__(self, at: int, error: type[BaseException] = torch.OutOfMemoryError):
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is operator.attend:
            with self:
                return operator._attend(*args, **(kwargs or {}))
        if not func.is_view and any(x.alias_info is None for x in func._schema.returns):
            self.fail()
        return func(*args, **(kwargs or {}))

    def fail(self) -> None:
        """Count, and raise if it is the turn."""
        self.count += 1
        if self.count == self.at:
            raise self.error("no memory")


class Interrupted:
    """Context that raises an interrupt before the `at`-th line that runs in some files.

    Attributes:
        count: number of lines so far.
        seen: for each line, its first and last number.
    """

    def __init__(self, at: int, files: Collection[str]):
        self.at, self.files, self.count = at, files, 0
        self.seen: dict[tuple[str, int], tuple[int, int]] = {}

    def __enter__(self) -> Interrupted:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen[line] = self.seen.get(line, (self.count, 0))[0], self.count
            if self.count == self.at:
                raise KeyboardInterrupt(f"interrupt at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._line
