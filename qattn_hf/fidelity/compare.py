"""Compare methods with full precision on a text. `qattn compare` prints the results.

Every method reads the same rows twice, in the same chunks and steps (`texts.Reading`).

End to end: the patched model's logits are compared with the logits of the unpatched model, by KL and the other figures
of `metrics.token_figures`. Here errors of earlier layers change the inputs of later layers.

Layer by layer: the unpatched model reads the text. Each layer has a shadow, a packed layer that receives the queries,
keys and values of every call. The shadow attends as in a patched model, and its output is compared with full precision
and dropped. Each layer is thus judged on its full-precision inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import Passes, constants
from qattn_hf.attention.observe import Call, observed, packed_layers, packed_windows
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report
from qattn_hf.cache.sizes import size_of
from qattn_hf.errors import QAttnError
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.model.device import device_of
from qattn_hf.model.supported_models import check_model
from qattn_hf.model.tensor_parallel import shard_of
from qattn_hf.patching import warm
from qattn_hf.patching.patcher import install, unpatch
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.metrics import AttentionSums, Tokens, over_layers, pareto, text_figures, token_figures
from qattn_hf.reading.texts import Reading, full_logits
from qattn_hf.recipes.recipe import Recipe, check_packs

if TYPE_CHECKING:
    from qattn_kernels.step.warm import Calls

Row = dict[str, Any]
Progress = Callable[[str], None]


class ShadowCaches:
    """Observer that feeds every call of a model in full precision to one packed cache for each recipe.

    Args:
        recipes: recipes by name.
        first: index of the first token whose output is compared.

    Attributes:
        caches: packed caches by name of the recipe.
        windows: layers that are packed sliding windows in at least one cache.
        sums: errors of attention outputs by recipe and packed layer.
    """

    def __init__(self, model: PreTrainedModel, recipes: dict[str, Recipe], first: int):
        self.model, self.first, self.passes = model, first, Passes()
        self.recipes = {name: recipe.for_model(model.config) for name, recipe in recipes.items()}
        self.renew()
        packed = packed_layers(model)
        windows = {name: packed_windows(cache) for name, cache in self.caches.items()}
        self.windows = {i for found in windows.values() for i in found}
        self.sums = {name: {i: AttentionSums() for i in sorted([*packed, *windows[name]])} for name in recipes}

    def renew(self) -> None:
        """Make empty caches for other rows. The sums continue."""
        self.caches = {name: self._empty(recipe) for name, recipe in self.recipes.items()}

    def _empty(self, recipe: Recipe) -> QAttnCache:
        check_packs(recipe)
        device = device_of(self.model).type
        specs = recipe.layer_specs(self.model.config, device, shard_of(self.model))
        return QAttnCache(specs, recipe, None, device).with_constants(constants(self.model, specs, self.passes))

    def __call__(self, call: Call) -> None:
        for name, cache in self.caches.items():
            layer = cache.layers[call.layer]
            if not isinstance(layer, QAttnLayer) or call.layer not in self.sums[name]:
                continue  # a window that this recipe keeps lossless
            skip = max(0, self.first - int(layer.get_seq_length()))
            out = call.packed_out(layer)
            if skip < out.shape[1]:
                self.sums[name][call.layer].add(call.out[:, skip:], out[:, skip:])


def compare(
    model: PreTrainedModel,
    recipes: dict[str, Recipe],
    reading: Reading,
    *,
    at_tokens: int = 4096,
    dtype: torch.dtype | None = None,
    by_layer: bool = True,
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Compare recipes with full precision on a text.

    Args:
        model: unpatched model. It is left unchanged.
        recipes: recipes by name, as `find_recipes` makes them.
        reading: rows of text, as `read_as` makes it. at_tokens: context length for which bits and bytes are counted.
        dtype: precision in which the model will run, if it differs from the precision measured here.
        by_layer: whether to measure layer by layer as well, which takes as long as one more recipe for each recipe.
        progress: called with a text before each step.

    Returns:
        One dict for each recipe, in order, for `print_table` and `draw`. `method` is the name. `kl` (in nats per
        token), `same_top1`, `rms_change` and the perplexities are for the whole model. `attention`, `layers` (both only
        with `by_layer`), `effective_bits`, `effective_bits_total` and `kv_bytes` are for the packed layers.
        `own_layers` is the number of unpacked layers. `pareto` says whether the recipe is on the Pareto front.

    Raises:
        QAttnError: a recipe packed nothing of the text, or the model is patched.
    """
    recipes = {name: recipe.for_model(model.config) for name, recipe in recipes.items()}
    tokens, sizes = {name: list[Tokens]() for name in recipes}, dict[str, Row]()
    warm.begin_for(model, recipes.values(), reading.calls())  # of all at once, before the first call needs one
    shadows = ShadowCaches(model, recipes if by_layer else {}, reading.first)
    for i, ids in enumerate(reading.groups()):
        group = f"rows {i * reading.batch + 1} to {i * reading.batch + len(ids)}"
        progress(f"{group}: full precision{', layer by layer' if by_layer else ''}")
        shadows.renew()
        with observed(model, shadows, shadows.windows):
            full = full_logits(model, ids, reading)
        for name, recipe in recipes.items():
            progress(f"{group}: {name}")
            figures, cache = through(model, recipe, name, ids, reading, full)
            tokens[name].append(figures)
            sizes[name] = _sizes(cache, at_tokens, dtype or model.dtype)
    rows = []
    for name, recipe in recipes.items():
        rows.append(
            {
                "method": name,
                "recipe": {"method": recipe.method, **recipe.given()},
                "rows": len(reading.ids),
                "tokens": reading.ids.shape[1],
                "scored_from": reading.first,
                **text_figures({key: torch.cat([t[key] for t in tokens[name]]) for key in tokens[name][0]}),
                **(_attention(shadows.sums[name]) if by_layer else {}),
                **sizes[name],
            }
        )
    best = pareto([(row["effective_bits_total"], row["kl"]) for row in rows])
    return [{**row, "pareto": i in best} for i, row in enumerate(rows)]


def _attention(sums: dict[int, AttentionSums]) -> Row:
    """Return the figures of attention outputs, over layers and by layer."""
    layers = {i: of_layer.figures() for i, of_layer in sums.items()}
    return {
        "attention": over_layers(list(layers.values())),
        "layers": [{"layer": i, **figures} for i, figures in layers.items()],
    }


def through(
    model: PreTrainedModel, recipe: Recipe, name: str, ids: torch.Tensor, reading: Reading, full: list[torch.Tensor]
) -> tuple[Tokens, QAttnCache]:
    """Read rows `ids` `[B, T]` through a packed cache. Returns figures of the scored tokens, and the cache.

    Args:
        name: name of the recipe, for messages.
        full: logits in full precision, as `full_logits` returns them.

    Raises:
        QAttnError: nothing was packed.
    """
    with packed(model, recipe, reading.calls()):
        parts: list[Tokens] = []
        for chunk in feed(model, ids.to(device_of(model)), reading.at):
            if chunk.stop > reading.first:
                parts.append(_chunk_figures(full[len(parts)], chunk.logits, ids, chunk.stop))
        cache = chunk.cache
        check_packed(cache, name, ids.shape[1], "read longer rows (--tokens)")
    return {key: torch.cat([part[key] for part in parts], 1).cpu() for key in parts[0]}, cache


@contextmanager
def packed(model: PreTrainedModel, recipe: Recipe, calls: Calls | None = None) -> Iterator[None]:
    """Patch a model with a recipe within a `with` block.

    Args:
        calls: calls whose kernels are compiled ahead, as `Reading.calls` returns them. By default the calls of
            `generate`.
    """
    check_model(model)
    install(model, recipe.for_model(model.config), calls)
    try:
        yield
    finally:
        unpatch(model)


def check_packed(cache: QAttnCache, name: str, tokens: int, instead: str) -> None:
    """Refuse a cache that has packed nothing after `tokens` tokens.

    Args:
        name: name of the recipe, for the message.
        instead: what the user can do, for the message.

    Raises:
        QAttnError: nothing was packed.
    """
    if not report(cache).to_dict()["packed_tokens"]:
        raise QAttnError(f"{name} packed nothing of {tokens} tokens, so that nothing was measured: {instead}")


def check_full(model: PreTrainedModel, tokens: int, what: str, instead: str) -> None:
    """Refuse a patched model, and texts of `tokens` tokens that are longer than the model's context.

    Args:
        what: the texts in words, for the message.
        instead: what to read instead, for the message.

    Raises:
        QAttnError: the model is patched, or the texts are too long.
    """
    if hasattr(model, "_qattn"):
        raise QAttnError("the model is patched, and full precision is what caches are compared with: unpatch(model)")
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise QAttnError(f"{what} are longer than the model's context of {longest}: take {instead}")


def _chunk_figures(full: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, stop: int) -> Tokens:
    """Compute figures of a chunk that ends at column `stop`. A row's last token has no target and is not scored."""
    scored = full.shape[1] - (stop == ids.shape[1])
    start = stop - full.shape[1]
    targets = ids[:, start + 1 : start + 1 + scored].to(full.device)
    return token_figures(full[:, :scored], logits[:, -full.shape[1] :][:, :scored], targets)


def _sizes(cache: QAttnCache, at_tokens: int, dtype: torch.dtype) -> Row:
    """Return bits and bytes of the cache at `at_tokens` tokens, and under `read` the figures after the text."""
    size, data = size_of(cache, at_tokens, dtype), report(cache).to_dict()
    return {
        "at_tokens": at_tokens,
        "effective_bits": size.effective_bits,
        "effective_bits_total": size.effective_bits_total,
        "kv_bytes": size.kv_bytes,
        "own_layers": len(cache.own),
        "impl": data["impl"],
        "read": {key: data[key] for key in ("packed_tokens", "open_tokens", "kv_bytes", "effective_bits_total")},
    }
