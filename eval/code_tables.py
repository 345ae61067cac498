"""Tables of methods, kernels and model families, asked of the code and of `configs/families`: nothing recorded."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from table import markdown

from qattn_hf.methods import Method, get_method, list_methods
from qattn_hf.recipes.families import Family, list_families
from qattn_hf.recipes.settings import known, reference_only
from qattn_kernels.layer import support

# Settings whose values kernels may compute or not: method, setting, and the values if its type does not name them.
CHOICES: tuple[tuple[Any, ...], ...] = (
    ("kivi", "bits"),
    ("kivi", "group_size"),
    ("kivi", "compute", "model", "int8"),
    ("none", "compute", "model", "int8"),
    ("sage2", "granularity", "token", "thread", "block"),
    ("sage2", "smooth_q", "none", "tensor", "block"),
    ("sage2", "pv"),
)
FAMILIES = ["family", "`model_type`", "method", "in place of its defaults", "why", "from", "measured"]


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


def two_sides(title: str, found: dict[Any, bool]) -> list[str]:
    """What kernels compute, and what the reference alone does."""
    return [title, *(names(value for value, known in found.items() if known == side) for side in (True, False))]


def choices(title: str, method: str, key: str, *values: Any, **others: Any) -> list[str]:
    """The values of a setting; those that its type names, if none are given."""
    values = values or get_args(get_method(method).model_fields[key].annotation)
    return two_sides(title, {value: known(method, **{key: value}, **others) for value in values})


def kernels_table(results: Path) -> str:
    """What Triton kernels compute and what the reference alone does."""
    rows = [
        two_sides("method", {name: known(name) for name in list_methods()}),
        ["head dim", support.head_dims(), "any other"],
        ["latent attention: channels of the latent", ", ".join(map(str, support.LATENT_DIMS)), "any other"],
        ["of its RoPE part", ", ".join(map(str, support.ROPE_DIMS)), "any other"],
        choices("`block_kv`", "turbo", "block_kv", buffer_size=128),
        *(choices(f"`{key}`", "turbo", key) for key in ("bits", "softmax")),
        choices("`priority`", "turbo", "priority", bits="mixed"),
        choices("`compute`", "turbo", "compute", "int8", "model"),
        choices("`sparse_v_tau`", "turbo", "sparse_v_tau", 0.0, 0.001),
        *(choices(f"`{key}` of `{method}`", method, key, *values) for method, key, *values in CHOICES),
    ]
    return markdown(["", "kernels", "reference alone"], rows)


def families_table(results: Path) -> str:
    """Families: settings in place of a method's defaults, the reason, and whether they were measured."""
    return markdown(FAMILIES, [row for family in list_families() for row in _family(family)])


def _family(family: Family) -> list[list[str]]:
    """One row for each method; methods with equal entries share one, and what is not packed comes last."""
    rows = []
    for section, same in groupby(family.methods.items(), key=lambda item: item[1]):
        settings = ", ".join(f"`{key}={value!r}`" for key, value in section.settings.items())
        why = " ".join(filter(None, [section.why, section.advice]))
        methods = names(method for method, _ in same)
        rows.append([methods, settings or "the defaults", why, section.source, section.measured or "no"])
    if family.waits is not None:
        rows.append(["all", "", family.waits, "", ""])
    return [[*((family.family, names(family.model_types)) if i == 0 else ("", "")), *row] for i, row in enumerate(rows)]
