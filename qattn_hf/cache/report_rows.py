"""Rows of a report, one per layer, counted from the layer's tensors."""

from __future__ import annotations

from typing import Any

import torch

from qattn_hf.cache.notices import quantizes, reads_no_code, written_once
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.model_layer import ModelLayer
from qattn_hf.model.layer_kinds import kind_of, of_method, window_of
from qattn_kernels.formats.model.reference import ModelFormat
from qattn_kernels.formats.traits import Span, aged_blocks
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.layout import State
from qattn_kernels.step.states import at_slots, bits_to_bool

OWN = "model"  # replaces a method's name for unpacked layers


def own_row(index: int, layer: ModelLayer) -> dict[str, Any]:
    """Return the row of an unpacked layer."""
    tensors = [tensor for tensor, _ in layer.state_tensors().values()]
    n_bytes, values = sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)
    dtypes = " and ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
    return {
        "layer": index,
        "method": OWN,
        "kind": layer.spec.kind,
        "own": str(layer.spec),
        "why": layer.spec.why,
        "k_format": dtypes,
        "v_format": dtypes,
        "kernels": OWN,
        "packed_tokens": 0,
        "open_tokens": 0,
        "bytes": n_bytes,
        "bytes_full_precision": n_bytes,
        "values": values,
        "effective_bits_total": 8 * n_bytes / values if values else None,
    }


def layer_row(index: int, layer: QAttnLayer, method: str, no_pool: str | None = None) -> dict[str, Any]:
    """Return the row of a packed layer of this method.

    Args:
        no_pool: why the layer lacks the sink pool of the method's defaults.
    """
    spec = layer.spec
    window = window_of(spec)
    row: dict[str, Any] = {
        "layer": index,
        "method": method,
        "kind": kind_of(spec),
        "window": window,
        "quantized": not isinstance(spec.k, ModelFormat) or not isinstance(spec.v, ModelFormat),
        "k_format": spec.k.label,
        "v_format": spec.v.label,
        "kernels": spec.impl,
        "prompt": layer.prompt_by,
        "packed_tokens": 0,
        "open_tokens": 0,
        "bytes": 0,
        "bytes_full_precision": 0,
    }
    if not layer.is_initialized:
        return row
    state, geo = layer.state, layer.geometry
    values = geo.heads * (geo.k_dim + geo.v_dim)
    lengths, closed = state["length"], int(state["block_len"].sum())
    tokens = int((lengths if window is None else lengths.clamp(max=window)).sum())
    opened = int((state["length"] - state["open_start"]).sum())
    packed, opened = (closed, opened) if spec.k.windowed or spec.v.windowed else (closed + opened, 0)
    packed, opened = (packed, opened) if of_method(spec) else (0, packed + opened)
    row["bytes"] = sum(t.nbytes for t, _ in layer.state_tensors().values())
    row |= {
        "packed_tokens": packed,
        "open_tokens": opened,
        "bytes_full_precision": tokens * values * layer.dtype.itemsize,
        "values": tokens * values,
        "effective_bits": _block_bits(layer, values) if of_method(spec) else None,
        "effective_bits_total": 8 * row["bytes"] / (tokens * values) if tokens else None,
        "capacity": layer.capacity,
        "short_blocks": int(((state["block_len"] > 0) & (state["block_len"] < spec.window.block)).sum()),
        "nonfinite": _nonfinite(layer),
        "lost": int(state["overflow"].sum()),
        "sinks": _sinks(layer),
        "no_sinks": no_pool,
        "clamped": sum(int(state[f"{s}.clamped"].sum()) for s in "kv" if f"{s}.clamped" in state),
        "unread": _unread(layer, packed),
        "clamped_scales": clamped_scales(spec, state),
        "bits_per_head": {side: _bits(layer, side) for side in "kv"},
        "tokens_by_bits": _tokens_by_bits(layer),
        "no_kernels": _why_reference(layer),
        "latent": spec.latent,
    }
    return row | _skipped(layer)


def _skipped(layer: QAttnLayer) -> dict[str, float]:
    """Return the figures of sparse V over all decode steps since the layer was empty; an empty dict if it is off."""
    if layer.spec.sparsity.tau == 0:
        return {}
    skip_counts = skip_counts_of(layer.state)
    return {
        "skip_rate": int(skip_counts.skipped.sum()) / max(1, int(skip_counts.read.sum())),
        "dropped_mass": float(skip_counts.dropped.sum()) / max(1, int(skip_counts.queries.sum())),
        "dropped_worst": float(skip_counts.worst.max()),
    }


def _in_pool(layer: QAttnLayer) -> torch.Tensor:
    """Return which entries of the sink table hold tokens kept out of the packed blocks: bool `[B, H, entries]`."""
    return (layer.state["sink.born"] > 0) & (layer.state["sink.written"] == 0)


def _sinks(layer: QAttnLayer) -> int:
    """Count the tokens that the sink pool keeps out of the packed blocks, over all rows and heads."""
    return int(_in_pool(layer).sum()) if layer.spec.sink_pool.num else 0


def _nonfinite(layer: QAttnLayer) -> int:
    """Count the tokens, over all rows, with a non-finite key or value in some KV head. They are masked in that head."""
    masked = bits_to_bool(layer.state["dropped"]).flatten(2)
    if layer.spec.sink_pool.num:  # sinks in the pool are masked in the blocks too
        masked = masked & ~at_slots(_in_pool(layer), layer.state["sink.slot"], masked.shape[2])
    return int(masked.any(1).sum())


def _unread(layer: QAttnLayer, packed: int) -> bool | None:
    """Return whether no token has read quantized values: nothing is packed, or one call filled the layer unquantized.

    None for a layer that does not quantize.
    """
    spec = layer.spec
    if not quantizes(spec):
        return None
    return reads_no_code(spec) and (written_once(layer) or not packed)


def clamped_scales(spec: LayerSpec, state: State) -> int:
    """Count the scales and zero points of closed blocks that are clamped at the end of fp16's range."""
    sides = ((spec.k.core, side_of(state, "k")), (spec.v.core, side_of(state, "v")))
    counts = [fmt.clamped_scales(tensors) for fmt, tensors in sides]
    closed = (state["block_len"] > 0)[:, None]
    return sum(int((count * closed).sum()) for count in counts if count is not None)


def _why_reference(layer: QAttnLayer) -> str | None:
    """Return why a layer on a GPU runs the reference; None if it runs kernels, and on a CPU."""
    geo = layer.geometry
    if layer.spec.impl != "reference" or layer.device.type != "cuda":
        return None
    reason = no_triton("cuda") or unsupported(layer.spec, geo.heads, geo.k_dim, geo.v_dim)
    return reason or "the recipe or the model's query heads ask for the reference"


def _block_bits(layer: QAttnLayer, values: int) -> float | None:
    """Return the bits per value in closed blocks, over all tensors that grow with blocks; None
    before a block closes."""
    closed, tokens = layer.state["block_len"] > 0, int(layer.state["block_len"].sum())
    if tokens == 0:
        return None
    n_bytes = 0.0
    for name, spec in layer.tensor_specs().items():
        tensor, used = layer.state[name], closed
        if spec.block_dim is None or not tensor.numel():
            continue
        spans = _spans(layer, name[0]) if name[2:7] == "codes" else []
        for bits, first, end in spans:
            used = closed[:, first:end] if name[2:] == f"codes{bits}" else used
        n_bytes += tensor.nbytes / (layer.geometry.batch * tensor.shape[spec.block_dim]) * int(used.sum())
    return 8 * n_bytes / (tokens * values)


def _spans(layer: QAttnLayer, side: str) -> list[Span]:
    """Return the runs of blocks with equal bits, for a side whose blocks differ; empty if they do not."""
    aged = aged_blocks(layer.spec.k if side == "k" else layer.spec.v)
    return [] if aged is None else aged.spans(layer.blocks)


def _tokens_by_bits(layer: QAttnLayer) -> dict[str, dict[int, int]]:
    """Return the packed tokens of all rows by bit width, for sides whose blocks differ."""
    length = layer.state["block_len"]
    found = {side: {bits: int(length[:, first:end].sum()) for bits, first, end in _spans(layer, side)} for side in "kv"}
    return {side: {bits: n for bits, n in counts.items() if n} for side, counts in found.items() if counts}


def _bits(layer: QAttnLayer, side: str) -> list[list[int]]:
    """Return the bit width of each head, one list per row; a single list if all rows are equal."""
    fmt = layer.spec.k if side == "k" else layer.spec.v
    rows = fmt.bits_per_head(side_of(layer.state, side), layer.geometry.heads)
    return rows[:1] if all(r == rows[0] for r in rows) else rows
