"""Methods beside full precision on a text: what `qattn compare` measures.

Every method reads the same rows twice, in the same chunks and steps (`texts.Reading`).

End to end, the model is patched and its logits are compared with those of the unpatched model: KL and what else
`metrics.token_figures` gives. Here a layer gets inputs that earlier layers have already changed.

Layer by layer, that would say little: the same attention would look worse the later it stands. So the unpatched model
reads the text, and beside each of its layers stands a packed one that gets the very same queries, keys and values of
every call, writes, packs and attends to them as in a patched model. Its output is compared with full precision's and
dropped: the model goes on as if nobody looked, and each layer is judged alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.cache import QAttnCache
from qattn_hf.chunks import feed
from qattn_hf.device import device_of
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.metrics import AttentionSums, Tokens, over_layers, pareto, text_figures, token_figures
from qattn_hf.fidelity.observe import Call, observed
from qattn_hf.fidelity.sizes import size_of
from qattn_hf.fidelity.texts import Reading
from qattn_hf.patcher import patch, unpatch
from qattn_hf.recipe import Recipe
from qattn_hf.reporting import report

Row = dict[str, Any]
Told = Callable[[str], None]


class Beside:
    """Packed layers of each recipe beside those of a model in full precision; see the module.

    Args:
        recipes: by name.
        first: outputs of earlier tokens are not counted.
    """

    def __init__(self, model: PreTrainedModel, recipes: dict[str, Recipe], first: int):
        self.model, self.recipes, self.first = model, recipes, first
        self.renew()
        self.sums = {name: [AttentionSums() for _ in cache.layers] for name, cache in self.caches.items()}

    def renew(self) -> None:
        """Fresh caches for other rows; the sums go on."""
        self.caches = {name: QAttnCache.for_model(self.model, recipe=recipe) for name, recipe in self.recipes.items()}

    def __call__(self, call: Call) -> None:
        skip = max(0, self.first - (call.keys.shape[2] - call.query.shape[2]))
        for name, cache in self.caches.items():
            out = call.packed_out(cache.layers[call.layer])
            if skip < out.shape[1]:
                self.sums[name][call.layer].add(call.out[:, skip:], out[:, skip:])


def compare(
    model: PreTrainedModel,
    recipes: dict[str, Recipe],
    reading: Reading,
    *,
    at_tokens: int = 4096,
    dtype: torch.dtype | None = None,
    told: Told = lambda what: None,
) -> list[Row]:
    """One row a recipe, in their order.

    Args:
        model: not patched; it is left as it was.
        recipes: by the names that the rows shall have.
        at_tokens: bits and bytes are those of one row of so many tokens.
        dtype: precision in which the model will run, if it is measured in another one.
        told: called with what comes next.

    Raises:
        QAttnError: if a recipe packed nothing of the text.
    """
    recipes = {name: recipe.for_model(model.config) for name, recipe in recipes.items()}
    tokens: dict[str, list[Tokens]] = {name: [] for name in recipes}
    beside = Beside(model, recipes, reading.first)
    held: dict[str, Row] = {}
    for i, ids in enumerate(reading.groups()):
        group = f"rows {i * reading.batch + 1} to {i * reading.batch + len(ids)}"
        told(f"{group}: full precision, layer by layer")
        beside.renew()
        with observed(model, beside):
            full = full_logits(model, ids, reading)
        for name, recipe in recipes.items():
            told(f"{group}: {name}")
            found, cache = through(model, recipe, name, ids, reading, full)
            tokens[name].append(found)
            held[name] = _held(cache, at_tokens, dtype or model.dtype)
    rows = []
    for name, recipe in recipes.items():
        layers = [sums.figures() for sums in beside.sums[name]]
        rows.append(
            {
                "method": name,
                "recipe": {"method": recipe.method, **recipe.given()},
                "rows": len(reading.ids),
                "tokens": reading.ids.shape[1],
                "scored_from": reading.first,
                **text_figures({key: torch.cat([t[key] for t in tokens[name]]) for key in tokens[name][0]}),
                "attention": over_layers(layers),
                "layers": layers,
                **held[name],
            }
        )
    best = pareto([(row["effective_bits_total"], row["kl"]) for row in rows])
    return [{**row, "pareto": i in best} for i, row in enumerate(rows)]


def full_logits(model: PreTrainedModel, ids: torch.Tensor, reading: Reading) -> list[torch.Tensor]:
    """Logits of the scored tokens, chunk by chunk, in the model's own precision, in which they were made."""
    chunks = feed(model, ids.to(device_of(model)), reading.at)
    return [c.logits[:, max(0, reading.first - c.start) :].to(model.dtype) for c in chunks if c.stop > reading.first]


def through(
    model: PreTrainedModel, recipe: Recipe, name: str, ids: torch.Tensor, reading: Reading, full: list[torch.Tensor]
) -> tuple[Tokens, QAttnCache]:
    """Figures of the scored tokens `[B, T]` read through the packed cache, and that cache.

    Raises:
        QAttnError: if nothing was packed.
    """
    patch(model, recipe=recipe)
    try:
        parts: list[Tokens] = []
        for chunk in feed(model, ids.to(device_of(model)), reading.at):
            if chunk.stop > reading.first:
                parts.append(_chunk_figures(full[len(parts)], chunk.logits, ids, chunk.stop))
        cache = chunk.cache
        if not report(cache).to_dict()["packed_tokens"]:
            raise QAttnError(
                f"{name} packed nothing of {ids.shape[1]} tokens, so that nothing was measured: read longer rows"
            )
    finally:
        unpatch(model)
    return {key: torch.cat([part[key] for part in parts], 1).cpu() for key in parts[0]}, cache


def _chunk_figures(full: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, stop: int) -> Tokens:
    """Of a chunk that ends at `stop`; the last token of a row predicts nothing that is known."""
    scored = full.shape[1] - (stop == ids.shape[1])
    start = stop - full.shape[1]
    right = ids[:, start + 1 : start + 1 + scored].to(full.device)
    return token_figures(full[:, :scored], logits[:, -full.shape[1] :][:, :scored], right)


def _held(cache: QAttnCache, at_tokens: int, dtype: torch.dtype) -> Row:
    """What such a cache takes at `at_tokens`, and what it held of the text."""
    size, read = size_of(cache, at_tokens, dtype), report(cache).to_dict()
    return {
        "at_tokens": at_tokens,
        "effective_bits": size.effective_bits,
        "effective_bits_total": size.effective_bits_total,
        "kv_bytes": size.kv_bytes,
        "impl": read["impl"],
        "read": {key: read[key] for key in ("packed_tokens", "open_tokens", "kv_bytes", "effective_bits_total")},
    }
