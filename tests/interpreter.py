"""Leave out work of Triton's interpreter that no result depends on. Kernels then take about a third of the time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Speed up all kernels that this process interprets."""
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()  # modules of Triton's language, in the launch that runs

    def patch_once(function: Any) -> Any:
        """Patch the language for a kernel. Triton also does so for each call of a device function, which takes longer
        than the call."""
        if (names := languages(function)) <= patched:
            return interpreter._LangPatchScope()
        patched.update(names)
        return patch(function)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # each launch restores the language at its end
        run(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch
    # Integers are added and multiplied a second time in 64 bits. Only `debug` would report an overflow.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    find, types = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(kind: Any) -> Any:
        """Return NumPy's type for one of Triton's. Triton builds a table of all types for each answer."""
        if kind.name not in types:
            types[kind.name] = find(kind)
        return types[kind.name]

    interpreter._get_np_dtype = numpy_type


@functools.cache
def languages(function: Any) -> frozenset[str]:
    """Return the modules of Triton's language that a function sees."""
    seen = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in seen if module in (tl, tl.core))
