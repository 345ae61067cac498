"""Count the bytes of unpacked layers for `check`: from the model's config, or from a call without memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from qattn_hf.layer.model_layer import state_tensors
from qattn_hf.model._compat import CACHE
from qattn_hf.model.heads import HeadSizes
from qattn_hf.model.layer_kinds import STATES, ModelLayerSpec


def own_row(spec: ModelLayerSpec, heads: HeadSizes, dtype: torch.dtype, at_tokens: int) -> dict[str, Any]:
    """Make a row of `Check.layers` for an unpacked layer. `fill_states` adds the bytes of states.

    Args:
        spec: spec of the layer.
        heads: head sizes of the layer.
        dtype: dtype of the model.
        at_tokens: length of the context.
    """
    name = str(dtype).removeprefix("torch.")
    most = (spec.window or 1) - 1  # tokens that the layer keeps; the newest one is added during a call
    values, states = heads.kv * 2 * heads.dim, spec.kind in STATES
    return {
        "method": "model",
        "kind": spec.kind,
        "own": str(spec),
        "why": spec.why,
        "k_format": name,
        "v_format": name,
        "kernels": "model",
        "no_kernels": None,
        "bytes": None if states else values * min(at_tokens, most) * dtype.itemsize,
        "bytes_at_most": None if states else values * most * dtype.itemsize,
        "values": None if states else values * min(at_tokens, most),
        "bytes_per_token": 0.0,
        "effective_bits": None,
    }


def fill_states(rows: list[dict[str, Any]], built: PreTrainedModel) -> None:
    """Add the bytes of convolution and recurrent states, which have one size, to the rows that lack them.

    The bytes are counted in a call of one token on the meta device. They stay None if the model cannot make this call
    because it reads values of tensors.

    Args:
        rows: `Check.layers`.
        built: the model on the meta device.
    """
    lacking = [row for row in rows if row["bytes"] is None]
    if not lacking:
        return
    cache = DynamicCache(config=built.config)
    try:
        with torch.device("meta"), torch.no_grad():
            built.eval()(torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{CACHE: cache})
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return
    for row in lacking:
        tensors = [tensor for tensor, _ in state_tensors(cache.layers[row["layer"]]).values()]
        row["bytes"] = row["bytes_at_most"] = sum(t.nbytes for t in tensors)
        row["values"] = sum(t.numel() for t in tensors)
