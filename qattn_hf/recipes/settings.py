"""List allowed values of a method's settings, and which values have kernels, for tables and the command line."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from qattn_hf.methods import get_method
from qattn_hf.methods.base import PARTS
from qattn_kernels.layer import support

# Other settings that a setting needs to have an effect.
NEEDED_WITH: dict[str, dict[str, Any]] = {
    "block_kv": {"buffer_size": 128},
    "priority": {"bits": "mixed"},
    "granularity": {"cache": "model"},
}
OTHERS = ("impl", "decode", "cache", "family")  # these choose how it runs, not what is computed
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
NAMES = {int: "integer", float: "number", str: "text"}


def known(method: str, **settings: Any) -> bool:
    """Return whether Triton kernels support a method with these settings, for a supported head dim and GPU."""
    spec = get_method(method)(**settings).last_layer_spec(2)
    return support.unsupported(spec, 2, support.HEAD_DIMS[0], support.HEAD_DIMS[0]) is None


def values_of(annotation: Any) -> tuple[Any, ...]:
    """Return all values of a type that lists them (`bool`, `Literal`), or nothing for numbers and lists."""
    if annotation is bool:
        return True, False
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(value for part in get_args(annotation) for value in values_of(part))
    return ()


def reference_only(method: str) -> dict[str, list[Any]]:
    """Return for each setting of a method the values that only the reference computes.

    Settings of one side (`k_bits`) are left out, because the result for `bits` applies to them.
    """
    kind, without_kernels = get_method(method), dict[str, list[Any]]()
    one_side = {f"{part}_{key}" for part in PARTS for key in kind.model_fields}
    for key, field in kind.model_fields.items():
        if key in OTHERS or key in one_side:
            continue
        others = {name: value for name, value in NEEDED_WITH.get(key, {}).items() if name in kind.model_fields}
        for value in values_of(field.annotation):
            try:
                if not known(method, **{**others, key: value}):
                    without_kernels.setdefault(key, []).append(value)
            except ValueError:  # an invalid combination
                continue
    return without_kernels


def as_written(value: Any) -> str:
    """Return a value as a recipe's YAML and `--set` write it: `null`, `true`, `4`, `mixed`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of a setting in words: `4, 2, mixed`, `integer, 0 to 8`, `number, below 0`, `text`."""
    annotation = field.annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words = []
    for part in parts:
        if named := values_of(part):
            words.append(", ".join(map(as_written, named)))
        elif part is type(None):
            words.append("null")
        elif get_origin(part) is list:
            words.append("for each layer a list of heads")
        else:
            words.append(", ".join(filter(None, [NAMES[part], _bounds(field)])))
    return " or ".join(words)


def _bounds(field: FieldInfo) -> str:
    """Return the bounds of a number in words: `0 to 8`, `above 0`."""
    limits = {key: getattr(item, key) for item in field.metadata for key in BOUNDS if hasattr(item, key)}
    if {"ge", "le"} <= limits.keys():
        return f"{limits['ge']} to {limits['le']}"
    return ", ".join(words.format(limits[key]) for key, words in BOUNDS.items() if key in limits)
