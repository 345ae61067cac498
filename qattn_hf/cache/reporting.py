"""Reports of a cache's content, counted from its tensors, not from its recipe."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from qattn_hf.attention.masks import check_earlier_mask
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.notices import borrowed_configurations
from qattn_hf.cache.report_rows import OWN, layer_row, own_row
from qattn_hf.errors import QAttnError
from qattn_hf.layer.model_layer import ModelLayer
from qattn_hf.messages import cut, size
from qattn_hf.model.layer_kinds import WINDOWED
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec


def report(model_or_cache: PreTrainedModel | QAttnCache) -> Report:
    """Report what a packed cache holds: tokens, bytes, bits, kernels, layer by layer; `print` it or take `to_dict()`.

    Args:
        model_or_cache: a `QAttnCache`, or a patched model, whose last cache is reported. Before the model's first call
            the report has no layers.

    Raises:
        QAttnError: a model that is not patched, or another kind of cache.
        UnsupportedError: the mask of an earlier step was wrong, so the cache is wrong too. On a GPU this is found late.
    """
    if isinstance(model_or_cache, QAttnCache):
        cache = model_or_cache
        check_earlier_mask(cache, wait=True)
        rows = [
            own_row(i, layer)
            if isinstance(layer, ModelLayer)
            else layer_row(i, layer, cache.recipe.method_of(i, layer.spec), cache.recipe.why_no_pool(i, layer.spec))
            for i, layer in enumerate(cache.layers)
        ]
        specs = [layer.spec for layer in cache.packed]
        devices = {layer.device.type for layer in cache.packed if layer.is_initialized}
        return Report(
            cache.recipe,
            _impl(specs),
            cache.decode,
            cache.decode_reason,
            rows,
            cache.prefill_chunk_size,
            configurations=borrowed_configurations(specs, "cuda" if "cuda" in devices else "cpu"),
        )
    patched = getattr(model_or_cache, "_qattn", None)
    if patched is None:
        raise QAttnError(f"report takes a patched model or a QAttnCache, not this {type(model_or_cache).__name__}")
    if patched.last.cache is not None:
        found = report(patched.last.cache)
    else:
        borrowed = borrowed_configurations(patched.packed, patched.device_type)
        runner, impl = patched.runner, _impl(patched.packed)
        found = Report(patched.recipe, impl, runner.how, runner.why, [], configurations=borrowed)
    return replace(found, pages=patched.last.pages, unpacked_call=patched.unpacked_call)


def _impl(specs: list[LayerSpec]) -> str:
    """Return the implementation of the packed layers: `triton`, `reference`, both, or `model` if no layer is packed."""
    return " and ".join(sorted({spec.impl for spec in specs})) or OWN


@dataclass(frozen=True)
class Report:
    """Content of a cache, as `report` counts it. `str()` gives a table for people, `to_dict()` data for programs.

    Attributes:
        recipe: the cache's recipe.
        impl: implementation of its layers: `triton`, `reference`, or both.
        decode, decode_reason: how decode steps ran, and why not otherwise; see `to_dict`.
        layers: one row per layer.
        prefill_chunk_size: tokens per call, if the last `generate` split its prompt; None: one call.
        pages: the pool of the model's last continuous batching; None without one.
        configurations: why kernels use the launch configurations of another GPU; None if they do not.
        unpacked_call: why the model's last call attended in full precision, as before `patch`; None if it packed.
    """

    recipe: Recipe
    impl: str
    decode: str
    decode_reason: str | None
    layers: list[dict[str, Any]]
    prefill_chunk_size: int | None = None
    pages: dict[str, Any] | None = None
    configurations: str | None = None
    unpacked_call: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that JSON can hold.

        - `method`, `recipe`, `recipe_origin`: name and all settings of the method, and their source.
        - `recipe_layers`: layers with other settings, or None. `recipe_family`: settings from the model's family with
          their reason, or None. `chosen`: why the model chose the recipe (`qattn_hf.recipes.chosen.Chosen`), or None.
        - `impl`: the implementation: `triton`, `reference`, or both.
        - `decode`: how the last `generate` ran its decode steps (`graph`, `fused`, `compile`, `eager`), or how it
          would. With Transformers' own caches it is `stock`, and bytes, tokens and `layers` are empty.
          `decode_reason`: why steps are not a graph, which parts of a `fused` one are compiled, why parts of a `graph`
          could not be compiled, or None.
        - `unpacked_call`: why the model's last call attended in full precision, as before `patch`, or None. The other
          figures describe the last packed call.
        - `configurations`: why kernels use the launch configurations of another GPU, or None.
        - `prefill_chunk_size`: tokens per call, if the last `generate` split its prompt, or None.
        - `packed_tokens`, `open_tokens`: tokens in closed blocks, and open tokens, of all rows in the packed layer that
          packed least. Sliding windows are ignored if other layers are packed.
        - `kv_bytes`: bytes of all tensors of all layers, including spare capacity and ring. `kv_bytes_full_precision`:
          bytes of the same tokens in the model's dtype. Both include unpacked layers.
        - `effective_bits`: bits per value in closed blocks, mean over packed layers. `effective_bits_total`: `kv_bytes`
          in bits per cached value, with unpacked layers. A sliding window counts only the values that a query sees.
        - `skip_rate`, `dropped_mass`: for sparse V, over all decode steps, as a mean over layers: the share of visible
          values that were skipped, and their share of the attention weights. `dropped_worst`: the largest such share of
          any query. None if sparse V is off.
        - `unread`: True if no token has read quantized values yet, so that outputs are full precision. None if nothing
          is quantized.
        - `continuous_batching`: the last pool of packed pages, or None. It has the tokens of a page, blocks (a page of
          each layer without a window), requests held at once, bytes of a block, of a request without its blocks and in
          total, whether requests share prefixes, the peaks of requests and blocks, `unread`, and `clamped_scales` after
          the end.
        - `layers`: one row per layer, with these figures and the formats of keys and values. An unpacked layer has
          `method` and `kernels` `model`, its type as `kind`, its content as `own`, and `why` its window is not packed.
          A packed layer has its `window` in tokens, or None, and `quantized`: False for the method `none` and for
          unquantized windows. `tokens_by_bits`: packed tokens by bit width, if blocks differ (`memory`).
          `clamped_scales`: fp16 scales and zero points at fp16's limit of 65,504.
        """
        total, full = (sum(row[key] for row in self.layers) for key in ("bytes", "bytes_full_precision"))
        counted = [row for row in self.layers if "own" not in row]
        counted = [row for row in counted if row["window"] is None] or counted
        values = sum(row.get("values", 0) for row in self.layers)
        packed, left = min(((row["packed_tokens"], row["open_tokens"]) for row in counted), default=(0, 0))
        return {
            **self._of_recipe(),
            "impl": self.impl,
            "decode": self.decode,
            "decode_reason": self.decode_reason,
            "unpacked_call": self.unpacked_call,
            "configurations": self.configurations,
            "prefill_chunk_size": self.prefill_chunk_size,
            "packed_tokens": packed,
            "open_tokens": left,
            "kv_bytes": total,
            "kv_bytes_full_precision": full,
            "effective_bits_total": 8 * total / values if values else None,
            **{key: self._mean(key) for key in MEANS},
            "dropped_worst": max((row["dropped_worst"] for row in self.layers if "dropped_worst" in row), default=None),
            "unread": self._unread(),
            "continuous_batching": self.pages,
            "layers": self.layers,
        }

    def _of_recipe(self) -> dict[str, Any]:
        """Return the fields of `to_dict` about the recipe."""
        recipe = self.recipe
        return {
            "method": recipe.method,
            "recipe": recipe.settings.model_dump(),
            "recipe_layers": {choice.where: choice.given for choice in recipe.choices},
            "recipe_origin": recipe.origin,
            "recipe_family": None if recipe.family is None else recipe.family.to_dict(),
            "chosen": None if recipe.chosen is None else recipe.chosen.to_dict(),
        }

    def _unread(self) -> bool | None:
        """Return whether no layer's quantized values were read; None if no layer quantizes."""
        unread = [row["unread"] for row in self.layers if row.get("unread") is not None]
        return all(unread) if unread else None

    def _mean(self, key: str) -> float | None:
        """Return the mean of a figure over the layers that have it; None if none has."""
        values = [row[key] for row in self.layers if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    def __str__(self) -> str:
        data = self.to_dict()
        # in a notebook rich would display the lines there and leave the text empty
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        own = [row for row in self.layers if "own" in row and row["kind"] != "dummy"]
        why = f" ({data['decode_reason']})" if data["decode_reason"] else ""
        methods = " and ".join(dict.fromkeys([data["method"], *(r["method"] for r in self.layers if "own" not in r)]))
        console.print(
            f"{methods} ({data['recipe_origin']}), computed by: {data['impl']}, decode: {data['decode']}{why}"
        )
        if self.unpacked_call is not None:
            console.print(f"the last call attended in full precision, as before patch: {self.unpacked_call}")
        if self.configurations is not None:
            console.print(self.configurations)
        if family := self._family_text():
            console.print(f"the model's family: {family}")
        if self.recipe.chosen is not None:
            console.print(str(self.recipe.chosen))
        if not self.recipe.settings.packs():
            console.print(
                "nothing is packed: keys and values are in transformers' own cache, and calls of more than "
                f"{SHORT_CALL} tokens quantize them for the duration of the call"
            )
        elif not data["kv_bytes"]:
            console.print(in_words(self.pages) if self.pages else "nothing cached yet: run the model first")
        else:
            for line in self._lines(data, own):
                console.print(line)
            console.print(self._table())
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _lines(self, data: dict[str, Any], own: list[dict[str, Any]]) -> Iterator[str]:
        """What a filled cache holds, a sentence a line; `own`: rows of the layers that are not packed."""
        yield (
            f"{size(data['kv_bytes'])} hold {data['packed_tokens']} packed and {data['open_tokens']} open tokens "
            f"per {'packed ' if own else ''}layer; unquantized they take {size(data['kv_bytes_full_precision'])}"
        )
        yield (
            f"bits a value: {_number(data['effective_bits'])} in closed blocks, "
            f"{_number(data['effective_bits_total'])} with ring and spare capacity"
            f"{' and the layers that are not packed' if own else ''}"
        )
        if data["unread"]:
            yield (
                "no token has read a code yet, so outputs so far equal full precision. `qattn compare` with this "
                "method measures the loss"
            )
        if own:
            yield (
                f"{len(own)} of {len(self.layers)} layers are not packed and take "
                f"{size(sum(row['bytes'] for row in own))} in the model's dtype"
            )
        if data["skip_rate"] is not None:
            yield (
                f"sparse V: {data['skip_rate']:.1%} of values skipped, which had {data['dropped_mass']:.1e} of a "
                f"query's weight, {data['dropped_worst']:.1e} at most"
            )

    def _family_text(self) -> str:
        """Return the family's settings, their reason and advice as text; empty if there are none."""
        if self.recipe.family is None:
            return ""
        section, changed = self.recipe.family.section, self.recipe.from_family()
        settings = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        return " ".join([*([f"{settings}. {section.why}"] if changed else []), *filter(None, [section.advice])])

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        several = len({row["method"] for row in self.layers}) > 1
        for name in ("layers", *(["method"] if several else []), "K", "V", "packed", "open", "bytes", "bits", "notes"):
            table.add_column(name, justify="left" if name in ("method", "K", "V", "notes") else "right")
        for layers, row in _grouped(self.layers):
            table.add_row(
                cut(layers, 30),
                *([row["method"]] if several else []),
                _format(row, "k"),
                _format(row, "v"),
                str(row["packed_tokens"]),
                str(row["open_tokens"]),
                size(row["bytes"]),
                _number(row.get("effective_bits")),
                _notes(row),
            )
        return table


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Merge rows that are equal except for `PER_LAYER` fields. Each comes with its layers: `0-4,6-10`."""
    groups: list[tuple[list[list[int]], dict[str, Any]]] = []
    for row in rows:
        runs = next((runs for runs, other in groups if _alike(row, other)), None)
        if runs is None:
            groups.append(([[row["layer"], row["layer"]]], row))
        elif runs[-1][1] == row["layer"] - 1:
            runs[-1][1] = row["layer"]
        else:
            runs.append([row["layer"], row["layer"]])
    return [(",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs), row) for runs, row in groups]


def _alike(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(other.get(key) == value for key, value in row.items() if key not in PER_LAYER)


def _format(row: dict[str, Any], side: str) -> str:
    """Return format and bits of a side as text.

    Examples: `flashq 4`; `flashq 4422`, head by head; `flashq 8 and 4` if blocks differ; `row by row` if rows of the
    batch differ.
    """
    if tokens := row.get("tokens_by_bits", {}).get(side, {}):
        return f"{row[side + '_format']} {' and '.join(str(bits) for bits in sorted(tokens, reverse=True))}"
    bits = row.get("bits_per_head", {}).get(side, [])
    if len(bits) != 1:
        return f"{row[side + '_format']} {'row by row' if bits else ''}".strip()
    distinct = set(bits[0])
    return f"{row[side + '_format']} " + (str(bits[0][0]) if len(distinct) == 1 else "".join(str(b) for b in bits[0]))


def _by_bits(side: str, tokens: dict[int, int]) -> str:
    """Return the tokens of a side by bit width as text: `V: 4 bits of 4096 tokens, 8 of 512`."""
    (first, count), *others = sorted(tokens.items())
    return f"{side.upper()}: {first} bits of {count} tokens" + "".join(f", {bits} of {n}" for bits, n in others)


def _notes(row: dict[str, Any]) -> str:
    unquantized = "" if row.get("quantized", True) else ", unquantized"
    why = f" ({row['why']})" if row.get("why") else ""
    notes = [row["own"] if row["kind"] == "dummy" else f"not packed: {row['own']}{why}"] if "own" in row else []
    notes += [f"{WINDOWED[row['kind']]} of {row['window']}{unquantized}"] if row.get("window") else []
    notes += [f"{row[key]} {text}" for key, text in NOTES.items() if row.get(key)]
    notes += [_by_bits(side, tokens) for side, tokens in row.get("tokens_by_bits", {}).items() if len(tokens) > 1]
    notes += ["sinks kept out"] if row.get("sinks") else []
    notes += [f"sinks: none ({row['no_sinks']})"] if row.get("no_sinks") else []
    notes += ["latent attention: V holds the latents, K the RoPE parts"] if row.get("latent") else []
    notes += [f"no kernels: {row['no_kernels']}"] if row.get("no_kernels") else []
    if row.get("skip_rate"):
        notes.append(f"{row['skip_rate']:.1%} of V skipped, weight {row['dropped_mass']:.1e}")
    return ", ".join(notes)


MEANS = ("effective_bits", "skip_rate", "dropped_mass")
PER_LAYER = ("layer", "sinks")  # fields in which the layers of a merged row may differ
NOTES = {
    "short_blocks": "short blocks",
    "nonfinite": "tokens not finite, masked",
    "clamped": "values clamped",
    "clamped_scales": "scales at the end of fp16, which clamps larger ones",
    "lost": "tokens beyond the capacity, lost",
}


def in_words(figures: dict[str, Any]) -> str:
    """Describe a pool with these `figures` (of a `PagedCache`) in words."""
    held = "continuous batching: {blocks} blocks of {page_tokens} tokens and {requests} requests in {total}, "
    text = (held + "at most {most_blocks} and {most_requests} were held at once").format(
        total=size(figures["bytes"]), **figures
    )
    text += f"; {figures['clamped_scales']} {NOTES['clamped_scales']}" if figures["clamped_scales"] else ""
    return text + ("; no token has read a code yet" if figures["unread"] else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
