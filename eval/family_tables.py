"""Tables of model families, made of `configs/families/*.yaml`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from recorded import markdown

from qattn_hf.recipes.families import Family, list_families

HEADER = ["family", "`model_type`", "method", "in place of its defaults", "why", "from", "measured"]


def families_table(results: Path) -> str:
    """Families: settings in place of a method's defaults, the reason, and whether they were measured."""
    return markdown(HEADER, [row for family in list_families() for row in _rows(family)])


def _rows(family: Family) -> list[list[str]]:
    """One row for each method; methods with equal entries share one, and what is not packed comes last."""
    rows = []
    for section, same in groupby(family.methods.items(), key=lambda item: item[1]):
        settings = ", ".join(f"`{key}={value!r}`" for key, value in section.settings.items())
        why = " ".join(filter(None, [section.why, section.advice]))
        methods = ", ".join(f"`{method}`" for method, _ in same)
        rows.append([methods, settings or "the defaults", why, section.source, section.measured or "no"])
    if family.waits is not None:
        rows.append(["all", "", family.waits, "", ""])
    types = ", ".join(f"`{name}`" for name in family.model_types)
    return [[family.family, types, *row] if i == 0 else ["", "", *row] for i, row in enumerate(rows)]
