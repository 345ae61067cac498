"""Read the keys and values of a layer, and keep some of its tokens (`QAttnCache.read`, `QAttnCache.keep`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.layer.changes import Change
from qattn_hf.layer.latent_layer import LatentLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.rollback import columns
from qattn_kernels.layer.arena import Layout, views
from qattn_kernels.step.states import Stored, kept_tokens, rotate_back, stored_tokens, write_kept

Masks = torch.Tensor | Sequence[torch.Tensor | None]
READABLE = (QAttnLayer, LatentLayer)  # others have windows, states, or a memory limit


def read(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a layer as attention reads them, fp32 `[B, Hkv, columns, D]`; zeros for padding and for
    tokens that were not finite.

    Raises:
        UnsupportedError: as in `first_columns`.
    """
    first = first_columns(layer)
    stored = _stored(layer)
    seen = int(layer.state["columns_seen"])
    column = torch.where(stored.real, (stored.pos + first[:, None])[:, None], seen)  # others: a column at the end
    keys, values, compute = stored.k, stored.v, layer.spec.compute
    if compute.rotate != "none":
        keys = rotate_back(keys)
    if compute.equalize:
        keys = keys / layer.state["k.equalizer"][0][:, None]
    if compute.rotate_v != "none":
        values = rotate_back(values)
    keys, values = (
        x.new_zeros(*x.shape[:2], seen + 1, x.shape[3]).scatter(2, column.long()[..., None].expand_as(x), x)[:, :, :-1]
        for x in (keys, values)
    )
    return keys, values


def changes_to(layers: Sequence[Any], masks: Masks) -> list[Change | None]:
    """Return the change of each layer that keeps the tokens of its mask, for `take`; None for a layer that stays.

    Args:
        masks: bool `[B, columns]` or `[B, Hkv, columns]`, for all layers that can be pruned, or one for each layer. A
            layer with None stays.

    Raises:
        QAttnError: a mask of another dtype or shape, or one that keeps no token of a row.
        UnsupportedError: as in `first_columns`; no layer can be pruned.
    """
    if isinstance(masks, torch.Tensor):
        masks = [masks if type(layer) in READABLE else None for layer in layers]
        if all(mask is None for mask in masks):
            first_columns(layers[0])
    if len(masks) != len(layers):
        raise QAttnError(f"keep takes one mask, or one for each of {len(layers)} layers, and got {len(masks)}")
    each = enumerate(zip(layers, masks, strict=True))
    return [None if mask is None else _kept(layer, mask, f"layer {i}") for i, (layer, mask) in each]


def _kept(layer: Any, mask: torch.Tensor, where: str) -> Change:
    first = first_columns(layer)
    geo, spec, state = layer.geometry, layer.spec, layer.state
    seen = int(state["columns_seen"])
    shapes = (geo.batch, seen), (geo.batch, geo.heads, seen)
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        raise QAttnError(
            f"{where}: keep takes a bool mask {list(shapes[0])} or {list(shapes[1])}, and got {mask.dtype} "
            f"{list(mask.shape)}"
        )
    mask = mask.to(layer.device).view(geo.batch, -1, seen).expand(-1, geo.heads, -1)
    column = (torch.arange(seen, device=mask.device) + first[:, None]).clamp(max=seen - 1)  # of each row position
    kept = kept_tokens(_stored(layer), mask.gather(2, column[:, None].expand_as(mask)))
    if not bool((kept.tokens > 0).all()):
        raise QAttnError(f"{where}: keep must keep a token of every row, and row {int(kept.tokens.argmin())} has none")
    blocks = layer.blocks if layer.max_cache_len is not None else -(-int(kept.tokens.max()) // spec.window.block)
    layout = Layout(replace(geo, blocks=blocks), spec)
    arena = layer.empty(layout, layer.device)
    write_kept(views(arena, layout), layout.geometry, spec, kept, state)
    return Change(arena, layout.geometry, spec)


def first_columns(layer: Any) -> torch.Tensor:
    """Return the column of the first token of each row, int `[B]`. Waits for the device.

    Raises:
        UnsupportedError: the layer has a window, states or a memory limit; it is empty; or its columns do not map to
            tokens, because padding is on the right or `keep` removed tokens.
    """
    if type(layer) not in READABLE:
        raise UnsupportedError(
            f"a {type(layer).__name__} cannot be read or pruned: give None for layers that have a window or states of "
            "linear attention, and leave memory= out"
        )
    layer.check_ended()
    if layer.batch is None:
        raise UnsupportedError("the cache is empty: read a prompt first, model(**inputs, past_key_values=cache)")
    first = layer.state["columns_seen"] - layer.state["length"]
    if columns(layer)[1] != int(first.max()):
        raise UnsupportedError(
            "columns of this cache do not map to tokens of its rows: keep removed some before, or a call had padding "
            "on the right. Read the prompt into a fresh cache, and keep once"
        )
    return first


def _stored(layer: QAttnLayer) -> Stored:
    return stored_tokens(layer.state, layer.geometry, layer.spec)
