"""Steps of `tune`: screen candidates, try some in each layer, and scale losses of layers so that they add up."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import packed_layers
from qattn_hf.cache.sizes import bits_total, geometry_of, layer_bytes, values_of
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.compare import Progress, Row
from qattn_hf.fidelity.estimate import anchors, estimated, fewer
from qattn_hf.fidelity.options import HeadLosses, Heads, Option, Shape, by_head, settings_with
from qattn_hf.fidelity.screening import Screening
from qattn_hf.layer.filled import packed_tokens
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.reading.metrics import pareto
from qattn_hf.reading.sensitivity import Trial, losses
from qattn_hf.reading.texts import Reading
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.layer.spec import LayerSpec

CLEARLY = 0.9  # a squared error counts as clearly smaller up to this share of another one
MIN_PACKED = 0.75  # share of a row that every candidate must pack
TINY = 1e-12
HeadKey = tuple[str, str, int]  # candidate, side, head; an empty side: no head has 2 bits


def check_candidates(candidates: dict[str, Recipe]) -> None:
    """Refuse candidates that differ by layer, which cannot be tried in one layer alone. This needs no model.

    Args:
        candidates: recipes by name.

    Raises:
        QAttnError: a candidate has `layers`. The message names it and what to leave out.
    """
    for name, recipe in candidates.items():
        if recipe.choices:
            raise QAttnError(f"{name} has settings by layers; a candidate is one for any layer: leave out layers")


def by_reference(recipe: Recipe) -> Recipe:
    """Return the recipe computed by the reference, without family defaults, as `recipe_of` returns it."""
    return dataclasses.replace(
        recipe, settings=recipe.settings.model_copy(update={"impl": "reference"}), by_family=False
    )


def _variant(name: str, side: str) -> str:
    """Return the name of a candidate with 2 bits in all heads of one side, or in no heads."""
    return f"{name}, 2 bits in {side or 'no'} heads"


class Tuner:
    """The steps of `tune` for one model: screening of candidates, and trials.

    Args:
        model: unpatched model. It is left unchanged.
        candidates: recipes by name.
        reading: rows of text that decide.
        at_tokens: context length for which bytes are counted.
        dtype: precision in which the model will run. Unquantized tensors of a cache are counted in it.
        progress: called with a text before each step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: dict[str, Recipe],
        reading: Reading,
        at_tokens: int,
        dtype: torch.dtype,
        progress: Progress,
    ):
        check_candidates(candidates)
        # use the reference: compiling kernels for every candidate takes longer than the trials
        self.candidates = {name: by_reference(recipe) for name, recipe in candidates.items()}
        self.model, self.progress = model, progress
        self.reading = Reading(reading.ids, fewer(reading.at), reading.first, reading.batch)
        self.at_tokens, self.dtype = at_tokens, dtype
        self.layers = packed_layers(model)
        heads = {i: head_sizes(model.config, i).kv for i in self.layers}
        self.shape = Shape(model.config.get_text_config(decoder=True).num_hidden_layers, heads)
        self.trials: list[Row] = []

    def screen(self) -> list[list[str]]:
        """Return the names of the candidates to try in each packed layer."""
        self.progress("screening candidates")
        self.screened = Screening(self.model, {**self.candidates, **self._by_head()})
        self._check_packed()
        self.screened.read(self.reading)
        return [self._candidates_of(i) for i in self.layers]

    def _by_head(self) -> dict[str, Recipe]:
        """Make three recipes for each candidate that chooses heads: 4 bits in all heads, 2 bits in K, 2 bits in V."""
        every, found = self._all_heads(), {}
        for name, recipe in self.candidates.items():
            for side in ("", "k", "v") if by_head(recipe) else ():
                lows = [(low if side == "k" else (), low if side == "v" else ()) for low in every]
                found[_variant(name, side)] = dataclasses.replace(recipe, settings=settings_with(recipe, lows))
        return found

    def _check_packed(self) -> None:
        """Refuse a candidate that leaves many tokens of a short row unquantized: a long context would lose more."""
        tokens = self.reading.ids.shape[1]
        for name in self.candidates:
            packed = min(packed_tokens(self.screened.specs[name][i], tokens) for i in self.layers)
            if packed < MIN_PACKED * tokens:
                raise QAttnError(
                    f"{name} packs {packed} of {tokens} tokens, too few to judge it by: read longer rows "
                    "(--tokens), or leave it out"
                )

    def _candidates_of(self, layer: int) -> list[str]:
        """Return the candidates on the Pareto front of bytes and error in a layer.

        Candidates that choose heads need many trials. One is kept only if its error is clearly smaller than any smaller
        candidate's error."""
        names, least = list(self.candidates), math.inf
        errors = [float(self.screened.squares[name][layer].sum()) for name in names]
        sizes = [self.bytes_of(self.screened.specs[name][layer], layer) for name in names]
        front = set(pareto(list(zip(sizes, errors, strict=True))))
        for i in sorted(range(len(names)), key=lambda i: sizes[i]):
            if by_head(self.candidates[names[i]]):
                (front.add if errors[i] < CLEARLY * least else front.discard)(i)
                least = min(least, errors[i])
        return [name for i, name in enumerate(names) if i in front]

    def fewest_bytes(self) -> int:
        """Return the bytes of all packed layers with their smallest candidates: 2 bits in heads that have a choice."""
        config, device = self.model.config, device_of(self.model).type
        low = [(heads, heads) for heads in self._all_heads()]
        found: list[list[Any]] = []
        for recipe in self.candidates.values():
            if by_head(recipe):
                recipe = dataclasses.replace(recipe, settings=settings_with(recipe, low))
            found.append(recipe.for_model(config).layer_specs(config, device))
        return sum(min(self.bytes_of(specs[layer], layer) for specs in found) for layer in self.layers)

    def _all_heads(self) -> list[Heads]:
        """Return the indices of the KV heads of each layer of the model."""
        return [tuple(range(self.shape.heads.get(i, 0))) for i in range(self.shape.layers)]

    def bytes_of(self, spec: LayerSpec, layer: int) -> int:
        """Return the bytes of a layer with this spec at `at_tokens` tokens."""
        return layer_bytes(spec, geometry_of(self.model.config, layer, self.dtype), self.at_tokens, self.dtype)

    def options(self, candidates: list[list[str]]) -> list[list[Option]]:
        """Try some candidates of each packed layer. Returns the options of each layer, with bytes and expected KL."""
        names_of = dict(zip(self.layers, candidates, strict=True))
        errors = {layer: self._errors(layer) for layer in self.layers}
        measured = self._measured(
            {
                layer: {key: error for key, error in errors[layer].items() if key[0] in names}
                for layer, names in names_of.items()
            }
        )
        losses_of = {layer: estimated(errors[layer], measured[layer]) for layer in self.layers}
        self.trials += [
            {
                "layer": layer,
                "candidate": name,
                "side": side,
                "head": head,
                "kl": loss,
                "measured": key in measured[layer],
            }
            for layer, loss_of in losses_of.items()
            for key, loss in loss_of.items()
            for name, side, head in (key,)
            if name in names_of[layer]
        ]
        ratios = {name: self._ratios(name, losses_of) for name in self.candidates}
        self.every = {
            layer: {name: self._options(layer, name, loss_of, ratios[name]) for name in self.candidates}
            for layer, loss_of in losses_of.items()
        }
        return [[option for name in names for option in self.every[layer][name]] for layer, names in names_of.items()]

    def _measured(self, errors: dict[int, dict[HeadKey, float]]) -> dict[int, dict[HeadKey, float]]:
        """Return the KL of the candidates of least and of largest error in each layer."""
        tried = [(layer, key) for layer, of_layer in errors.items() for key in anchors(of_layer)]
        tried.sort(key=lambda one: one[1])  # layers with the same spec are computed together
        measured: dict[int, dict[HeadKey, float]] = {layer: {} for layer in self.layers}
        trials = [self._trial(layer, *key) for layer, key in tried]
        for n, ((layer, key), loss) in enumerate(zip(tried, losses(self.model, trials, self.reading), strict=True)):
            measured[layer][key] = loss
            self.progress(f"trials: {n + 1} of {len(trials)}")
        return measured

    def _ratios(self, name: str, losses_of: dict[int, dict[HeadKey, float]]) -> dict[str, float]:
        """Return the ratio of a candidate's loss on all layers to the sum of its losses in single layers.

        For a candidate that chooses heads, `k` and `v` have the ratio of what 2 bits in all heads of a side add."""
        wholes, heads = self.screened.wholes, by_head(self.candidates[name])
        none = {layer: loss_of[name, "", 0] for layer, loss_of in losses_of.items()}
        whole = wholes[_variant(name, "") if heads else name]
        found = {"": whole / max(sum(none.values()), TINY)}
        for side in "kv" if heads else ():
            more = [
                max(0.0, loss_of[name, side, head] - none[layer])
                for layer, loss_of in losses_of.items()
                for head in range(self.shape.heads[layer])
            ]
            found[side] = max(0.0, wholes[_variant(name, side)] - whole) / max(sum(more), TINY)
        return found

    def _errors(self, layer: int) -> dict[HeadKey, float]:
        """Return the squared errors of what can be tried of all candidates in a layer."""
        return {key: self._error(layer, *key) for name in self.candidates for key in self._keys(layer, name)}

    def _keys(self, layer: int, name: str) -> list[HeadKey]:
        """Return what can be tried of a candidate in a layer: no head at 2 bits, and each single head at 2 bits."""
        heads = range(self.shape.heads[layer]) if by_head(self.candidates[name]) else ()
        return [(name, "", 0), *((name, side, head) for side in "kv" for head in heads)]

    def _error(self, layer: int, name: str, side: str, head: int) -> float:
        """Return the squared error of a layer's attention output. A 2-bit head changes only the error of that head."""
        squares = self.screened.squares
        if not by_head(self.candidates[name]):
            return float(squares[name][layer].sum())
        of_heads = squares[_variant(name, "")][layer].clone()
        if side:
            of_heads[head] = squares[_variant(name, side)][layer][head]
        return float(of_heads.sum())

    def _trial(self, layer: int, name: str, side: str, head: int) -> Trial:
        k_low, v_low = ((head,) if side == one else () for one in "kv")
        return self._packed(layer, name, k_low, v_low)

    def _packed(self, layer: int, name: str, k_low: Heads, v_low: Heads) -> Trial:
        spec = self.shape.spec(self.candidates[name], layer, k_low, v_low)
        return Trial(layer, spec, self.screened.constants[name][layer])

    def _options(self, layer: int, name: str, loss_of: dict[HeadKey, float], ratios: dict[str, float]) -> list[Option]:
        recipe, alone = self.candidates[name], loss_of[name, "", 0]
        none = alone * ratios[""]
        if not by_head(recipe):
            return [Option(layer, name, (), (), self.bytes_of(self.screened.specs[name][layer], layer), none)]
        k, v = (
            [
                none + ratios[side] * max(0.0, loss_of[name, side, head] - alone)
                for head in range(self.shape.heads[layer])
            ]
            for side in "kv"
        )
        return [
            Option(layer, name, k_low, v_low, self.bytes_of(self.shape.spec(recipe, layer, k_low, v_low), layer), kl)
            for k_low, v_low, kl in HeadLosses(none, k, v).combinations()
        ]

    def whole(self, options: list[Option]) -> float:
        """Return the KL of one option for each packed layer, all together, in nats per token."""
        trial = [self._packed(one.layer, one.candidate, one.k_low, one.v_low) for one in options]
        return next(losses(self.model, [trial], self.reading))

    def uniform(self, bits: float) -> tuple[str, float] | None:
        """Return the candidate of least KL within `bits` that all layers can share, and its KL. None if none fits.

        Candidates that choose heads differ from layer to layer, and are left out."""
        fitting = [name for name, recipe in self.candidates.items() if not by_head(recipe) and self._bits(name) <= bits]
        best = min(fitting, key=lambda name: self.screened.wholes[name], default=None)
        return None if best is None else (best, self.screened.wholes[best])

    def in_all_layers(self, name: str) -> list[Option]:
        """Return the options of a candidate that does not choose heads."""
        return [self.every[layer][name][0] for layer in self.layers]

    def _bits(self, name: str) -> float:
        specs = {i: self.screened.specs[name][i] for i in self.layers}
        return bits_total(self.model.config, specs, self.at_tokens, self.dtype)

    def values(self) -> int:
        """Return the number of cached values of one row of `at_tokens` tokens, over all packed layers."""
        return sum(values_of(geometry_of(self.model.config, i, self.dtype), self.at_tokens) for i in self.layers)
