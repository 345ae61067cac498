"""Tables of methods and their settings: what kernels compute and what the reference alone does, asked of
the code that decides it; nothing recorded is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from recorded import markdown

from qattn_hf.methods import Method, get_method, list_methods
from qattn_hf.methods.base import PARTS
from qattn_kernels.layer import support

# What a setting needs beside it to act.
BESIDE: dict[str, dict[str, Any]] = {
    "block_kv": {"buffer_size": 128},
    "priority": {"bits": "mixed"},
    "granularity": {"cache": "model"},
    **{key: {"sink_num": 3} for key in ("sink_select", "sink_exclude", "sink_prefill")},
}
OTHERS = ("impl", "decode", "cache", "family")  # how it runs, not what is computed


def known(method: str, **settings: Any) -> bool:
    """Whether kernels compute it, on a GPU that has all they need."""
    spec = get_method(method)(**settings).last_layer_spec(2)
    return support.unsupported(spec, 2, 2, support.HEAD_DIMS[0], support.HEAD_DIMS[0]) is None


def values_of(annotation: Any) -> tuple[Any, ...]:
    """The values that a setting's type names, if it names them."""
    if annotation is bool:
        return True, False
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(value for part in get_args(annotation) for value in values_of(part))
    return ()


def reference_only(method: str) -> dict[str, list[Any]]:
    """Of a method's settings, the values that no kernel computes; a setting of one side stands under that of both."""
    kind, found = get_method(method), dict[str, list[Any]]()
    one_side = {f"{part}_{key}" for part in PARTS for key in kind.model_fields}
    for key, field in kind.model_fields.items():
        if key in OTHERS or key in one_side:
            continue
        beside = {name: value for name, value in BESIDE.get(key, {}).items() if name in kind.model_fields}
        for value in values_of(field.annotation):
            try:
                if not known(method, **{**beside, key: value}):
                    found.setdefault(key, []).append(value)
            except ValueError:  # it is refused so: nobody computes it
                continue
    return found


def names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{field}`" for field in fields)


def methods_table(results: Path) -> str:
    """Every method found, with its summary and its settings."""
    rows = []
    for name in list_methods():
        method = get_method(name)
        summary = (method.__doc__ or "").strip().splitlines()[0]
        own = names(key for key in method.model_fields if key not in Method.model_fields)
        alone = [f"`{key}`: {', '.join(map(str, values))}" for key, values in reference_only(name).items()]
        rows.append([f"`{name}`", summary, own, "; ".join(alone)])
    rows.append(["every method", "", names(Method.model_fields), ""])
    return markdown(["method", "what it does", "settings", "reference only"], rows)


def kernels_table(results: Path) -> str:
    """What Triton kernels compute and what the reference alone does."""

    def two_sides(title: str, found: dict[Any, bool]) -> list[str]:
        sides = ([f"`{value}`" for value, known in found.items() if known == side] for side in (True, False))
        return [title, *map(", ".join, sides)]

    def choices(method: str, key: str, *values: Any, **others: Any) -> list[str]:
        """The values of a setting; those that its type names, if none are given."""
        values = values or get_args(get_method(method).model_fields[key].annotation)
        return two_sides(f"`{key}`", {x: known(method, **{key: x}, **others) for x in values})

    rows = [
        two_sides("method", {name: known(name) for name in list_methods()}),
        ["head dim, of K and V alike", ", ".join(map(str, support.HEAD_DIMS)), "any other"],
        ["query heads of a KV head", f"up to {support.MOST_GROUP}", "more"],
        choices("turbo", "block_kv", buffer_size=128),
        *(choices("turbo", key) for key in ("bits", "buffer_scale", "p_scale", "softmax")),
        choices("turbo", "priority", bits="mixed"),
        choices("turbo", "compute", "int8", "model"),
        choices("turbo", "sparse_v_tau", 0.0, 0.001),
        *(
            [f"`{key}` of `{method}`", *choices(method, key, *values)[1:]]
            for method, key, *values in (
                ("kivi", "bits"),
                ("kivi", "group_size"),
                ("kivi", "compute", "model", "int8"),
                ("sinkq", "sink_select"),
                ("sinkq", "sink_exclude", True, False),
                ("sinkq", "sink_prefill"),
                ("none", "compute", "model", "int8"),
                ("int_flash", "v_granularity"),
                ("sage2", "granularity", "token", "thread", "block"),
                ("sage2", "smooth_q", "none", "tensor", "block"),
                ("sage2", "pv"),
                ("sage2", "v_scale"),
            )
        ),
    ]
    return markdown(["", "kernels", "reference alone"], rows)
