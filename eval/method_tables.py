"""Tables of methods and their settings: what kernels compute and what the reference alone does, asked of
the code that decides it; nothing recorded is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from recorded import markdown

from qattn_hf.methods import Method, get_method, list_methods
from qattn_hf.recipes.settings import known, reference_only
from qattn_kernels.layer import support


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
        ["latent attention: channels of the latent", ", ".join(map(str, support.LATENT_DIMS)), "any other"],
        ["of its RoPE part", ", ".join(map(str, support.ROPE_DIMS)), "any other"],
        choices("turbo", "block_kv", buffer_size=128),
        *(choices("turbo", key) for key in ("bits", "softmax")),
        choices("turbo", "priority", bits="mixed"),
        choices("turbo", "compute", "int8", "model"),
        choices("turbo", "sparse_v_tau", 0.0, 0.001),
        *(
            [f"`{key}` of `{method}`", *choices(method, key, *values)[1:]]
            for method, key, *values in (
                ("kivi", "bits"),
                ("kivi", "group_size"),
                ("kivi", "compute", "model", "int8"),
                ("none", "compute", "model", "int8"),
                ("sage2", "granularity", "token", "thread", "block"),
                ("sage2", "smooth_q", "none", "tensor", "block"),
                ("sage2", "pv"),
            )
        ),
    ]
    return markdown(["", "kernels", "reference alone"], rows)
