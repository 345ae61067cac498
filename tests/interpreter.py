"""Leave out work of Triton's interpreter that no result depends on. Kernels then take about a third of the time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
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
    tl.core.block_type.__init__, tl.core.tensor.__init__ = block_type, tensor
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Broadcast tensors of different shapes. Triton compares shapes as compile-time values, which takes longer than
        the sum of two tensors."""
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Be `tl.block_type.__init__`."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, _, _ = of_shape(sizes)
    self.name = f"<{sizes}, {element_ty}>"


def tensor(self: Any, handle: Any, type: Any) -> None:
    """Be `tl.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, _, self.shape, self.numel = of_shape(tuple(type.shape) if type.is_block() else ())


@functools.cache
def of_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, tl.tuple, tl.constexpr]:
    """Return the shape and the number of elements of a type, and the same as compile-time values for its tensors.

    Triton makes and checks them anew for each tensor. Nothing changes them.
    """
    numel = validate_block_shape(sizes)
    return tl.tuple(sizes), numel, tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)


@functools.cache
def languages(function: Any) -> frozenset[str]:
    """Return the modules of Triton's language that a function sees."""
    seen = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in seen if module in (tl, tl.core))
