"""Memory that runs out, or an interrupt that comes, at one allocation or launch of a call after another."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qattn_kernels.step import operator


class Failing(TorchDispatchMode):
    """Context in which operation number `at` raises `error`, of those that allocate a tensor, which it counts.

    What the operator of a packed layer does is counted too, but for the inside of kernels that are interpreted.
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
