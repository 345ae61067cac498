"""Copies of functions in which some global names mean something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of `function` whose module globals have these names replaced.

    Nothing of the module changes. Decorators are dropped. In Transformers they rename old arguments, or turn off
    gradients, which are off in `generate`.
    """
    own: Any = inspect.unwrap(function)
    copy = FunctionType(own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy
