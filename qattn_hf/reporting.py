"""What is really packed: read from the tensors of a cache, never from what a recipe promises."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from qattn_hf.cache import QAttnCache
from qattn_hf.errors import QAttnError
from qattn_hf.layer import QAttnLayer
from qattn_hf.messages import size
from qattn_hf.recipe import Recipe
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.ops.sink_pool.table import at_slots
from qattn_kernels.reference.rows import bits_to_bool


def report(model_or_cache: PreTrainedModel | QAttnCache) -> Report:
    """What a cache holds, or the last cache of a patched model; a model that has not run reports no layers.

    Raises:
        QAttnError: for a model that is not patched, or another kind of cache.
    """
    if isinstance(model_or_cache, QAttnCache):
        cache = model_or_cache
        rows = [_layer_row(i, layer, cache.recipe.settings_of(i).name()) for i, layer in enumerate(cache.layers)]
        specs = [layer.spec for layer in cache.layers]
        return Report(cache.recipe, _who(specs), cache.decode, cache.decode_reason, rows)
    patched = getattr(model_or_cache, "_qattn", None)
    if patched is None:
        raise QAttnError(f"report takes a patched model or a QAttnCache, not this {type(model_or_cache).__name__}")
    if patched.last.cache is not None:
        return report(patched.last.cache)
    return Report(patched.recipe, _who(patched.specs), patched.decode, patched.decode_reason, [])


def _who(specs: list[LayerSpec]) -> str:
    """`triton`, `reference`, or both where layers differ."""
    return " and ".join(sorted({spec.impl for spec in specs}))


def _layer_row(index: int, layer: QAttnLayer, method: str) -> dict[str, Any]:
    spec = layer.spec
    row: dict[str, Any] = {
        "layer": index,
        "method": method,
        "kind": "full_attention",
        "k_format": spec.k.label,
        "v_format": spec.v.label,
        "kernels": spec.impl,
        "packed_tokens": 0,
        "open_tokens": 0,
        "bytes": 0,
        "bytes_full_precision": 0,
    }
    if not layer.is_initialized:
        return row
    state, geo = layer.state, layer.geometry
    values = geo.heads * (geo.k_dim + geo.v_dim)
    tokens, closed = int(state["length"].sum()), int(state["block_len"].sum())
    windowed = spec.k.windowed or spec.v.windowed
    packed = closed if windowed else tokens
    row["bytes"] = sum(t.nbytes for t, _ in layer.state_tensors().values())
    row |= {
        "packed_tokens": packed,
        "open_tokens": tokens - packed,
        "bytes_full_precision": tokens * values * layer.dtype.itemsize,
        "effective_bits": _block_bits(layer, values),
        "effective_bits_total": 8 * row["bytes"] / (tokens * values) if tokens else None,
        "capacity": layer.capacity,
        "short_blocks": int(((state["block_len"] > 0) & (state["block_len"] < spec.window.block)).sum()),
        "nonfinite": _nonfinite(layer),
        "lost": int(state["overflow"].sum()),
        "sinks": _sinks(layer),
        "clamped": sum(int(state[f"{s}.clamped"].sum()) for s in "kv" if f"{s}.clamped" in state),
        "bits_per_head": {side: _bits(layer, side) for side in "kv"},
        "no_kernels": _why_reference(layer),
    }
    return row | _skipped(layer)


def _skipped(layer: QAttnLayer) -> dict[str, float]:
    """What sparse V did in all decodes since the layer was empty; nothing where it is off."""
    if layer.spec.sparsity.tau == 0:
        return {}
    skip_counts = skip_counts_of(layer.state)
    return {
        "skip_rate": int(skip_counts.skipped.sum()) / max(1, int(skip_counts.read.sum())),
        "dropped_mass": float(skip_counts.dropped.sum()) / max(1, int(skip_counts.queries.sum())),
        "dropped_worst": float(skip_counts.worst.max()),
    }


def _in_pool(layer: QAttnLayer) -> torch.Tensor:
    """Which entries of the table of sinks stand for a token that is out of the codes: bool `[B, H, entries]`."""
    return (layer.state["sink.born"] > 0) & (layer.state["sink.written"] == 0)


def _sinks(layer: QAttnLayer) -> int:
    """Tokens that the sink pool keeps out of the codes, of all rows and heads."""
    return int(_in_pool(layer).sum()) if layer.spec.sink_pool.num else 0


def _nonfinite(layer: QAttnLayer) -> int:
    """Tokens of all rows that are masked in some KV head, because their key or value there is not finite."""
    masked = bits_to_bool(layer.state["dropped"]).flatten(2)
    if layer.spec.sink_pool.num:  # its tokens are masked too, where they stand in the blocks
        masked = masked & ~at_slots(_in_pool(layer), layer.state["sink.slot"], masked.shape[2])
    return int(masked.any(1).sum())


def _why_reference(layer: QAttnLayer) -> str | None:
    """Why the reference computes a layer that is on a GPU, where one expects kernels."""
    geo = layer.geometry
    if layer.spec.impl != "reference" or layer.device.type != "cuda":
        return None
    reason = no_triton("cuda") or unsupported(layer.spec, geo.heads, geo.heads, geo.k_dim, geo.v_dim)
    return reason or "the recipe or the model's query heads ask for the reference"


def _block_bits(layer: QAttnLayer, values: int) -> float | None:
    """Bits a value of the closed blocks, everything counted that grows with them; None while none is closed."""
    state, block = layer.state, layer.spec.window.block
    blocks, tokens = int((state["block_len"] > 0).sum()), int(state["block_len"].sum())
    if tokens == 0:
        return None
    grows = [state[name] for name, spec in layer.tensor_specs().items() if spec.block_dim is not None]
    slot = sum(t.nbytes for t in grows) / (layer.geometry.batch * layer.blocks * block)
    return 8 * slot * block * blocks / (tokens * values)


def _bits(layer: QAttnLayer, side: str) -> list[list[int]]:
    """Code bits of each head for each row; one list if all rows agree."""
    fmt = layer.spec.k if side == "k" else layer.spec.v
    rows = fmt.bits_per_head(side_of(layer.state, side), layer.geometry.heads)
    return rows[:1] if all(r == rows[0] for r in rows) else rows


@dataclass(frozen=True)
class Report:
    """`str()` is a table for people, `to_dict()` data for programs."""

    recipe: Recipe
    impl: str
    decode: str
    decode_reason: str | None
    layers: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Totals and layers. `recipe_layers`: what the recipe chooses otherwise for some of them. `recipe_family`: what
        the model's family gave in place of the method's defaults, why, and what measured it; None: it says nothing.

        `packed_tokens`, `open_tokens`: tokens of all rows, packed in the layer that packed least, and the rest of them.
        `kv_bytes`: all state tensors, spare capacity and ring included; `kv_bytes_full_precision`: the same tokens in
        the model's precision. `effective_bits`: a value of the closed blocks, mean over layers; `effective_bits_total`:
        `kv_bytes` over all values. `impl`: who computes. `decode`: the path that the cache's last `generate` took, or
        the one it would take before any cache was made; `decode_reason`: why it is not the one to expect, or None.
        Over transformers' own caches `decode` is `stock`, bytes and tokens are 0 and `layers` empty: nothing is packed.
        Sparse V, over all decodes and None where it is off: `skip_rate` values that were not read, of those that
        queries saw, and `dropped_mass` what they weighed, of a query's weights, both mean over layers; `dropped_worst`:
        of any query.
        """
        settings = self.recipe.settings
        total, full = (sum(row[key] for row in self.layers) for key in ("bytes", "bytes_full_precision"))
        per_layer = [(r["packed_tokens"], r["open_tokens"]) for r in self.layers]
        packed, left = min(per_layer, default=(0, 0))
        return {
            "method": self.recipe.method,
            "recipe": settings.model_dump(),
            "recipe_layers": {choice.where: choice.given for choice in self.recipe.choices},
            "recipe_origin": self.recipe.origin,
            "recipe_family": None if self.recipe.family is None else self.recipe.family.to_dict(),
            "impl": self.impl,
            "decode": self.decode,
            "decode_reason": self.decode_reason,
            "packed_tokens": packed,
            "open_tokens": left,
            "kv_bytes": total,
            "kv_bytes_full_precision": full,
            **{key: self._mean(key) for key in MEANS},
            "dropped_worst": max((row["dropped_worst"] for row in self.layers if "dropped_worst" in row), default=None),
            "layers": self.layers,
        }

    def _mean(self, key: str) -> float | None:
        """Of the layers that have such a number."""
        found = [row[key] for row in self.layers if row.get(key) is not None]
        return sum(found) / len(found) if found else None

    def __str__(self) -> str:
        data = self.to_dict()
        # in a notebook rich would show the lines there and leave the text empty
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        why = f" ({data['decode_reason']})" if data["decode_reason"] else ""
        methods = " and ".join(dict.fromkeys([data["method"], *(row["method"] for row in self.layers)]))
        console.print(
            f"{methods} ({data['recipe_origin']}), computed by: {data['impl']}, decode: {data['decode']}{why}"
        )
        if said := self._of_family():
            console.print(f"the model's family: {said}")
        if not self.recipe.settings.packs():
            console.print(
                "nothing is packed: keys and values stand in transformers' own cache, and calls of more than "
                f"{SHORT_CALL} tokens make codes of them that live as long as the call"
            )
        elif not data["kv_bytes"]:
            console.print("nothing cached yet: run the model first")
        else:
            console.print(
                f"{size(data['kv_bytes'])} hold {data['packed_tokens']} packed and {data['open_tokens']} open tokens "
                f"a layer; in model precision {size(data['kv_bytes_full_precision'])}"
            )
            console.print(
                f"bits a value: {_number(data['effective_bits'])} in closed blocks, "
                f"{_number(data['effective_bits_total'])} with ring and spare capacity"
            )
            if data["skip_rate"] is not None:
                console.print(
                    f"sparse V: {data['skip_rate']:.1%} of values skipped, which had {data['dropped_mass']:.1e} of a "
                    f"query's weight, {data['dropped_worst']:.1e} at most"
                )
            console.print(self._table())
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _of_family(self) -> str:
        """What the model's family changed and why, and what it advises; nothing where the defaults stand."""
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
        for first, last, row in _grouped(self.layers):
            table.add_row(
                str(first) if first == last else f"{first}-{last}",
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


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Runs of layers that differ in nothing but what each has of its own."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for row in rows:
        if runs and all(runs[-1][2].get(key) == value for key, value in row.items() if key not in OWN):
            runs[-1] = (runs[-1][0], row["layer"], runs[-1][2])
        else:
            runs.append((row["layer"], row["layer"], row))
    return runs


def _format(row: dict[str, Any], side: str) -> str:
    """`flashq 4` or, head by head, `flashq 4422`; `row by row` where the rows of the batch differ."""
    bits = row.get("bits_per_head", {}).get(side, [])
    if len(bits) != 1:
        return f"{row[side + '_format']} {'row by row' if bits else ''}".strip()
    one = set(bits[0])
    return f"{row[side + '_format']} " + (str(bits[0][0]) if len(one) == 1 else "".join(str(b) for b in bits[0]))


def _notes(row: dict[str, Any]) -> str:
    notes = [f"{row[key]} {text}" for key, text in NOTES.items() if row.get(key)]
    notes += ["sinks kept out"] if row.get("sinks") else []
    notes += [f"no kernels: {row['no_kernels']}"] if row.get("no_kernels") else []
    if row.get("skip_rate"):
        notes.append(f"{row['skip_rate']:.1%} of V skipped, weight {row['dropped_mass']:.1e}")
    return ", ".join(notes)


MEANS = ("effective_bits", "effective_bits_total", "skip_rate", "dropped_mass")
OWN = ("layer", "sinks")  # of a row; how many sinks are kept differs from layer to layer
NOTES = {
    "short_blocks": "short blocks",
    "nonfinite": "tokens not finite, masked",
    "clamped": "values clamped",
    "lost": "tokens beyond the capacity, lost",
}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
