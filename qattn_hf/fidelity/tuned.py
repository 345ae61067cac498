"""A choice for every layer as one recipe: what most layers have in common, and the others under `layers`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from qattn_hf.fidelity.options import Option, by_head, settings_with
from qattn_hf.methods import Method
from qattn_hf.recipe import Recipe, find_recipe


def recipe_of(options: Sequence[Option], candidates: dict[str, Recipe]) -> Recipe:
    """The recipe that gives each layer its option, and takes nothing from the model's family: it was measured so."""
    lows = [(option.k_low, option.v_low) for option in options]
    wanted = {
        name: settings_with(recipe, lows) if by_head(recipe) else recipe.settings
        for name, recipe in candidates.items()
        if any(option.candidate == name for option in options)
    }
    # of equally many layers those of a candidate that chooses heads, whose lists are of all layers anyway
    ranked = Counter(option.candidate for option in options)
    common = max(wanted, key=lambda name: (ranked[name], by_head(candidates[name])))
    base = wanted[common]
    layers: dict[str, list[int]] = {}
    for i, option in enumerate(options):
        if option.candidate != common:
            layers.setdefault(option.candidate, []).append(i)
    entries = {ranges(where): changes(base, wanted[name]) for name, where in layers.items()}
    given = base.model_dump(exclude_unset=True)
    found = find_recipe(base.name(), None, {**given, **({"layers": entries} if entries else {})})
    return dataclasses.replace(found, by_family=False)


def changes(base: Method, wanted: Method) -> dict[str, Any]:
    """What an entry of `layers` must say so that `wanted` holds in a recipe of `base`."""
    same = wanted.name() == base.name()
    inherited = {
        key: value for key, value in base.model_dump(exclude_unset=True).items() if same or key in Method.model_fields
    }
    given, full = wanted.model_dump(exclude_unset=True), wanted.model_dump()
    found = {key: value for key, value in given.items() if key not in inherited or inherited[key] != value}
    found |= {key: full[key] for key in inherited if key not in given and inherited[key] != full[key]}
    left = wanted.not_overridden(inherited, found)  # what these cover must be said again
    found |= {key: value for key, value in given.items() if key not in left}
    return found if same else {"method": wanted.name(), **found}


def ranges(layers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2,5`."""
    parts = []
    for _, run in groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0]):
        found = [layer for _, layer in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)
