"""Leave out work of Triton's interpreter that no result depends on. Kernels then take about a third of the time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

PLAIN = (tl.tensor, int, tl.dtype, tl.block_type, type(None))  # most values that are not `constexpr`


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
    tl.core.block_type.name = property(block_name)
    interpreter._patch_attr = patch_attribute
    TritonSemantic.computation_type_impl = functools.cache(TritonSemantic.computation_type_impl)
    TritonSemantic.binary_op_type_checking_impl = operands
    broadcast, unwrap = TritonSemantic.broadcast_impl_value, tl.core._unwrap_if_constexpr

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Broadcast tensors of different shapes. Triton compares shapes as compile-time values, which takes longer than
        the sum of two tensors."""
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in PLAIN else unwrap(value)


def operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Be `TritonSemantic.binary_op_type_checking_impl`.

    Operands of different shapes get the type of the result and keep their data: the operation itself broadcasts it.
    """
    is_number, other_is_number = not isinstance(lhs, tl.tensor), not isinstance(rhs, tl.tensor)
    kind = self.to_tensor_type(lhs) if is_number else lhs.dtype
    other_kind = self.to_tensor_type(rhs) if other_is_number else rhs.dtype
    self.check_ptr_type_impl(kind, other_kind, allow_lhs_ptr)
    self.check_ptr_type_impl(other_kind, kind, allow_rhs_ptr)
    if arithmetic_check and not kind.is_ptr() and not other_kind.is_ptr():
        common = self.computation_type_impl(kind, is_number, other_kind, other_is_number, div_or_mod)
        lhs = lhs if kind is common and not is_number else self._cast_to_computation_type(lhs, common)
        rhs = rhs if other_kind is common and not other_is_number else self._cast_to_computation_type(rhs, common)
    else:
        lhs, rhs = self.to_tensor(lhs), self.to_tensor(rhs)
    if lhs.shape is rhs.shape:
        return lhs, rhs
    sizes = of_both(sizes_of(lhs), sizes_of(rhs))
    return with_sizes(lhs, sizes), with_sizes(rhs, sizes)


def sizes_of(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape.values) if value.type.is_block() else ()


def with_sizes(value: Any, sizes: tuple[int, ...]) -> Any:
    return value if sizes_of(value) == sizes else tl.tensor(value.handle, tl.block_type(value.dtype, sizes))


@functools.cache
def of_both(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that two shapes are broadcast to."""
    return np.broadcast_shapes(first, second)


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Be `tl.block_type.__init__`."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, _, _ = of_shape(sizes)


def block_name(self: Any) -> str:
    """Return the name of a block's type. Triton makes it for each type, and hardly anything asks for it."""
    return f"<{tuple(self.shape)}, {self.element_ty}>"


def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Be `interpreter._patch_attr`. Triton copies the keywords of each call without the compiler's semantic."""
    semantic = getattr(interpreter, "interpreter_semantic", None) or TritonSemantic(builder)

    def call(*args: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = semantic
        return member(*args, **keywords)

    scope.set_attr(obj, name, call)


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
