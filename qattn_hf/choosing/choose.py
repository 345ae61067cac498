"""Choose a recipe for a model within a budget, for `patch(model, bits=3.5)` and `patch(model, kl=0.01)`.

A probe measures settings of this package on one short row. The setting of least KL within the budget is used for all
layers. `qattn tune` takes longer and can choose different settings for each layer.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

from transformers import PreTrainedModel

from qattn_hf.choosing.candidates import Candidate, candidates
from qattn_hf.choosing.probe import TOGETHER, Probe, measure, probe_of
from qattn_hf.choosing.reasons import cost_of, reasons
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.messages import named, shown
from qattn_hf.model.tensor_parallel import shard_of
from qattn_hf.recipes.chosen import Chosen, Tried
from qattn_hf.recipes.recipe import Recipe, find_recipe
from qattn_hf.recipes.recipe_settings import SHARED

FEWEST = 2.0  # every setting has at least this many bits
AS_GOOD = 1.05  # KLs within this ratio count as equal: fewer bits win, then the simpler setting
LEAST_SHARE = 0.7  # settings below this share of the bits of the largest one within the budget are not tried


def check_budget(settings: dict[str, Any]) -> tuple[float | None, float | None, dict[str, Any]]:
    """Return the budget of `patch` without a method, and the other settings.

    Returns:
        `bits` and `kl`, one of them None, and the remaining settings.

    Raises:
        RecipeError: both or neither are given, the budget is too small or not a number, or a setting belongs to single
            methods.
    """
    shared = {key: value for key, value in settings.items() if key not in ("bits", "kl")}
    bits, kl = settings.get("bits"), settings.get("kl")
    if (bits is None) == (kl is None):
        raise RecipeError(f"bits={shown(bits)}, kl={shown(kl)}: without a method give one of them, such as bits=3.5")
    for name, value in (("bits", bits), ("kl", kl)):
        if value is not None and not _is_number(value):
            raise RecipeError(
                f"{name}={shown(value)}: without a method it is a number, such as bits=3.5 or kl=0.01. "
                f'For a setting of a method name the method: patch(model, "turbo", {name}={shown(value)})'
            )
    if bits is not None and bits < FEWEST:
        raise RecipeError(f"bits={bits}: the smallest settings have a little more than {FEWEST:g} bits; take bits=2.5")
    if kl is not None and kl <= 0:
        raise RecipeError(f"kl={kl}: a KL to full precision is above 0, such as kl=0.01 nats a token")
    if other := [key for key in shared if key not in SHARED]:
        raise RecipeError(
            f"{named(other[0])} is a setting of some methods, and without a method patch chooses one: name a method, "
            f'as in patch(model, "turbo", {", ".join(map(named, settings))}), or leave {named(other[0])} out'
        )
    return bits, kl, shared


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, and neither a bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def warn_of_whole_bits(bits: float | None, stacklevel: int) -> None:
    """Warn that `patch(model, bits=4)` chooses a method, where the bits may be meant for turbo."""
    if isinstance(bits, int) and bits in (2, 4):
        warnings.warn(
            f"patch(model, bits={bits}) chooses among all methods by a short probe; for turbo with {bits} bits write "
            f'patch(model, "turbo", bits={bits}), and for a choice without this warning bits={bits}.0',
            stacklevel=stacklevel,
        )


def choose(model: PreTrainedModel, bits: float | None, kl: float | None, shared: dict[str, Any]) -> Recipe:
    """Return the recipe that loses least within `bits`, or the smallest recipe that loses no more than `kl`.

    Args:
        model: unpatched model, or a model whose weights were probed earlier. It is left unchanged.
        bits: bits per value in closed blocks, mean over the packed layers. This is `effective_bits` of a report and the
            number in tables of settings: the cost of one more token in a long context. Unquantized recent tokens add
            0.03 to 0.6 bits at 4,096 tokens, with any setting.
        kl: KL to full precision, in nats per token, over the probe.
        shared: settings that all methods have (`SHARED`). With `memory`, `bits` are the final bits of the blocks.

    Raises:
        RecipeError: no setting meets the budget. The message has the number of the nearest setting.
        UnsupportedError: the model's attention cannot be observed, or the model is split over processes.
    """
    if shard_of(model).size > 1:
        raise UnsupportedError(f"{_asked(bits, kl)}: a model that is split over processes cannot choose: name a method")
    try:
        known = candidates(model, shared)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{_asked(bits, kl)} chooses by what a probe of the attention shows. {error}. Name a method: "
            'patch(model, "turbo")'
        ) from None
    if bits is not None:
        within = _within_bits(known, bits)
        probe = probe_of(model)
        measure(model, probe, within)
    else:
        assert kl is not None
        probe = probe_of(model)
        within = _within_kl(model, probe, known, kl)
    best = _best(probe, within, by_bits=bits is None)
    recipe = find_recipe(None, best.recipe, shared) if shared else best.recipe
    origin = f"chosen for {_asked(bits, kl)}: {best.setting}"
    return dataclasses.replace(recipe, origin=origin, by_family=False, chosen=_told(probe, within, best, bits, kl))


def _asked(bits: float | None, kl: float | None) -> str:
    return f"bits={bits:g}" if bits is not None else f"kl={kl:g}"


def _within_bits(known: list[Candidate], bits: float) -> list[Candidate]:
    """Return the candidates to try, in order of bits."""
    within = [one for one in known if one.bits <= bits]
    if not within:
        least = min(known, key=lambda one: one.bits)
        raise RecipeError(
            f"bits={bits:g}: for this model the smallest setting, {least.setting}, has {least.bits:.3f} bits a value "
            f"in closed blocks: take bits={math.ceil(100 * least.bits) / 100:g}"
        )
    most = max(one.bits for one in within)
    return sorted((one for one in within if one.bits >= LEAST_SHARE * most), key=lambda one: one.bits)


def _within_kl(model: PreTrainedModel, probe: Probe, known: list[Candidate], kl: float) -> list[Candidate]:
    """Return the candidates that lose no more than `kl`, from the first group in order of bits that has any."""
    ordered = sorted(known, key=lambda one: one.bits)
    for start in range(0, len(ordered), TOGETHER):
        measure(model, probe, ordered[start : start + TOGETHER])
        if within := [one for one in ordered[: start + TOGETHER] if probe.kl_of(one) <= kl]:
            return within
    least = min(map(probe.kl_of, ordered))
    raise RecipeError(f"kl={kl:g}: the best setting loses {least:.6f} over the probe: allow more")


def _best(probe: Probe, within: list[Candidate], by_bits: bool) -> Candidate:
    """Return the candidate of least KL, or with `by_bits` of fewest bits. Near ties go to the smallest and simplest."""
    least = min(map(probe.kl_of, within))
    good = within if by_bits else [one for one in within if probe.kl_of(one) <= AS_GOOD * least]
    return min(good, key=lambda one: (round(one.bits, 2), cost_of(one), probe.kl_of(one)))


def _told(probe: Probe, within: list[Candidate], best: Candidate, bits: float | None, kl: float | None) -> Chosen:
    tried = sorted((Tried(one.setting, one.bits, probe.kl_of(one)) for one in within), key=lambda one: one.kl)
    return Chosen(
        bits,
        kl,
        best.setting,
        best.bits,
        probe.kl_of(best),
        reasons(probe, within, best),
        probe.facts,
        tuple(tried),
        probe.read,
        probe.seconds,
        probe.forwards,
    )
