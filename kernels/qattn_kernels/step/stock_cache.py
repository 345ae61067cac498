"""Prefill attention over the keys and values of a stock cache. Quantized values exist during one call and are not
stored."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from qattn_kernels.formats import Operand
from qattn_kernels.launch.constants import WIDEST_TILE
from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute, LayerSpec, decode_spec
from qattn_kernels.layout import ROW_FIELDS, Row
from qattn_kernels.ops.prefill.reference import attend_all
from qattn_kernels.reference.operands import fp8_values
from qattn_kernels.reference.query_parts import in_columns, query_parts
from qattn_kernels.reference.tiles import FOREVER, Tiles


def attend_over(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    offset: int | torch.Tensor,
    spec: LayerSpec,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention of `T` new tokens over `S` columns of a cache.

    The arithmetic is the prefill of `spec.compute`.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, S, D]`, with the new tokens in the columns from `offset` on.
        key_mask: bool `[B, S]`, false for columns without a token. Columns after the new tokens count as masked. So do
            non-finite keys and values, which would spoil the scales and means of all others.
        offset: column of the first query, an int for all rows or `[B]`.
        spec: unquantized formats; `spec.impl` chooses reference or kernels.
        scores: scale, cap, window and sinks of the scores.

    Returns:
        Output `[B, Hq, T, Dv]` in the query's dtype, and fp32 log-sum-exp `[B, Hq, T]` of the true scores, without
            smoothing. Padding before a row's first new token has zeros in both. Padding after a row's last token sees
            all its tokens.
    """
    at = offset if isinstance(offset, torch.Tensor) else torch.full((), offset, device=query.device)
    at = at.to(query.device, torch.int32).expand(query.shape[0])
    sizes = scores.scale, scores.softcap, scores.window, scores.sinks
    return over(query, key, value, key_mask, at, spec.encode(), *sizes)


@torch.library.custom_op("qattn::attend_over", mutates_args=())
def over(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    offset: torch.Tensor,
    spec: str,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attend_over` as an operator. `offset` is int32 `[B]`, `spec` encoded; the other arguments are fields of
    `Scores`."""
    layer, scores, tokens = decode_spec(spec), Scores(scale, softcap, window, sinks), query.shape[2]
    columns = torch.arange(key.shape[2], device=key.device)
    finite = torch.stack([bound(x, (1, 3)) for x in (key, value) for bound in (torch.amin, torch.amax)]).isfinite()
    key_mask = key_mask & (columns < offset[:, None] + tokens) & finite.all(0)
    rows = _rows(key_mask, offset, tokens)
    if layer.impl == "triton":
        from qattn_kernels.ops.prefill.launch import prefill

        with torch.cuda.device_of(query):  # Triton launches on the current device
            return prefill(query, _unpacked(key, value, key_mask, rows, layer), layer, scores)
    with torch.autocast(query.device.type, enabled=False):  # integer products sum exactly in fp32 only
        return _reference(query, key, value, key_mask, rows, layer, scores)


@over.register_fake
def _(query, key, value, key_mask, offset, spec, scale, softcap, window, sinks):
    batch, heads, tokens = query.shape[:3]
    out = query.new_empty((batch, tokens, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, tokens), dtype=torch.float32)


def _rows(key_mask: torch.Tensor, offset: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return `UnpackedKV.rows` of a stock cache, int32 `[B, ROW_FIELDS]`; the cache's columns are its slots.

    A row's past ends at its first real query. Padding between real tokens is computed like a token, because only its
    keys matter to others."""
    columns = offset[:, None].long() + torch.arange(tokens, device=offset.device)
    new = key_mask.gather(1, columns).int()
    first = new.argmax(1)
    count = (tokens - new.flip(1).argmax(1) - first) * new.amax(1)
    none = torch.zeros_like(first)
    row = Row(offset + first, closed=none, open_start=none, closing=none, first=first, count=count)
    return pad(torch.stack([x.int() for x in row], 1), (0, ROW_FIELDS - len(row)))


def _unpacked(
    key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor, rows: torch.Tensor, spec: LayerSpec
) -> UnpackedKV:
    """Return keys and values of a stock cache for a prefill kernel; the cache's columns are its slots.

    A side that the prefill quantizes is used in place. Any other side is copied, padded to whole tiles."""
    batch, heads, columns, _ = key.shape
    behind = -columns % max(spec.window.block, WIDEST_TILE)
    coded_k, coded_v = _coded(spec.compute)
    bias = pad(torch.where(key_mask, 0.0, -torch.inf), (0, behind), value=-torch.inf)
    pos = torch.arange(columns + behind, dtype=torch.int32, device=key.device)
    return UnpackedKV(
        _side(key, coded_k, behind),
        None,
        _side(value, coded_v, behind),
        None,
        bias=bias[:, None].expand(-1, heads, -1).contiguous(),
        pos=pos.expand(batch, -1).contiguous(),
        rows=rows,
    )


def _coded(compute: Compute) -> tuple[bool, bool]:
    """Return whether a prefill quantizes keys, and whether it quantizes values."""
    int8 = compute.prefill == "int8"
    return int8, fp8_values(compute) or (int8 and compute.pv == "int8")


def _side(x: torch.Tensor, coded: bool, behind: int) -> torch.Tensor:
    if coded:
        return x if x.stride(3) == 1 else x.contiguous()
    return pad(x, (0, 0, 0, behind)).contiguous()


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    rows: torch.Tensor,
    spec: LayerSpec,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as the kernels in plain PyTorch: the specification."""
    length, span, block = rows[:, 0], rows[:, 4:6], spec.window.block
    parts = query_parts(query, span, length)
    behind = -key.shape[2] % block
    k, v = (Operand(pad(x, (0, 0, 0, behind)).unflatten(2, (-1, block)), None) for x in (key, value))
    keep = pad(key_mask, (0, behind)).unflatten(1, (-1, block))[:, None].expand(-1, key.shape[1], -1, -1)
    pos = torch.arange(key.shape[2] + behind, dtype=torch.int32, device=key.device).view(1, 1, -1, block)
    tiles = Tiles(k, v, pos, pos, torch.full_like(pos, FOREVER), keep)
    past = int(length.max()) if length.device.type == "cpu" else key.shape[2]  # on a GPU that would wait
    results = attend_all(parts, tiles, spec, scores, lambda end: -(-(past + end) // block))
    out, lse = in_columns(parts, results, query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse  # same memory order as the kernels' output
