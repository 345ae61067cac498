"""Convert options chosen for packed layers to one recipe: the most frequent candidate, others under `layers`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from qattn_hf.fidelity.options import Heads, Option, by_head, settings_with
from qattn_hf.methods import Method
from qattn_hf.recipes.recipe import Recipe, find_recipe


def recipe_of(options: Sequence[Option], candidates: dict[str, Recipe], count: int) -> Recipe:
    """Make the recipe that gives packed layers their options, without defaults of the model's family.

    Args:
        options: one for each packed layer.
        candidates: recipes by name.
        count: layers of the model. Layers without an option stay unpacked and have empty lists of heads.
    """
    lows: list[tuple[Heads, Heads]] = [((), ())] * count
    for option in options:
        lows[option.layer] = (option.k_low, option.v_low)
    wanted = {
        name: settings_with(recipe, lows) if by_head(recipe) else recipe.settings
        for name, recipe in candidates.items()
        if any(option.candidate == name for option in options)
    }
    # if frequencies are equal, prefer a candidate that chooses heads: its lists cover all layers anyway
    ranked = Counter(option.candidate for option in options)
    common = max(wanted, key=lambda name: (ranked[name], by_head(candidates[name])))
    base = wanted[common]
    layers: dict[str, list[int]] = {}
    for option in options:
        if option.candidate != common:
            layers.setdefault(option.candidate, []).append(option.layer)
    entries = {ranges(where): changes(base, wanted[name]) for name, where in layers.items()}
    explicit = base.model_dump(exclude_unset=True)
    recipe = find_recipe(base.name(), None, {**explicit, **({"layers": entries} if entries else {})})
    return dataclasses.replace(recipe, by_family=False)


def changes(base: Method, wanted: Method) -> dict[str, Any]:
    """Return the settings of an entry of `layers` that gives `wanted` in a recipe of `base`."""
    same = wanted.name() == base.name()
    inherited = {
        key: value for key, value in base.model_dump(exclude_unset=True).items() if same or key in Method.model_fields
    }
    explicit, full = wanted.model_dump(exclude_unset=True), wanted.model_dump()
    entry = {key: value for key, value in explicit.items() if key not in inherited or inherited[key] != value}
    # a setting covered by the entry (`k_bits` by `bits`) returns to its default without being repeated
    uncovered = wanted.not_overridden(inherited, entry)
    entry |= {key: full[key] for key in uncovered if key not in explicit and inherited[key] != full[key]}
    remaining = wanted.not_overridden(inherited, entry)  # settings covered by these must be repeated
    entry |= {key: value for key, value in explicit.items() if key not in remaining}
    return entry if same else {"method": wanted.name(), **entry}


def ranges(layers: list[int]) -> str:
    """Format layer indices as the key of an entry of `layers`: `[0, 1, 2, 5]` -> `0-2,5`."""
    parts = []
    for _, run in groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0]):
        indices = [layer for _, layer in run]
        parts.append(str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}")
    return ",".join(parts)
