"""A step of one token per row on a CPU, in plain PyTorch: what `step.reference` computes, bit for bit.

The host reads the rows' lengths, so tokens are slices of the state, and no operation serves padding, longer calls or
other lengths. `state_of_rows` says which calls qualify; `step.reference` computes all others, such as a step that
closes a block."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from qattn_kernels.formats import Arrival, Format, Operand
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.table import read_sinks
from qattn_kernels.reference.rows import bits_to_bool, open_span_blocks
from qattn_kernels.reference.softmax import sas_exp
from qattn_kernels.reference.tiles import last_hidden


class Rows(NamedTuple):
    """Lengths that all rows have before the call.

    Attributes:
        length: tokens.
        closed: packed blocks.
        open_start: row position of the first open token.
        open_blocks: tiles of open tokens, the new one included.
    """

    length: int
    closed: int
    open_start: int
    open_blocks: int


def alike(state: State, span: torch.Tensor, spec: LayerSpec, scores: Scores) -> Rows | None:
    """Return the lengths of the rows if `one_token` computes the step of a call with one column, else None.

    It does on a CPU, if all rows are equally long and without short blocks, each gets one token, and no block closes.
    After a crop the rows first grow back to their longest length, so that nothing removed is left behind the end."""
    window, pool = spec.window, spec.sink_pool
    if span.device.type != "cpu" or spec.latent or spec.sparsity.tau > 0 or pool.select == "attention":
        return None
    if spec.v.smoothed or (pool.num and (scores.window or not spec.v.windowed)):
        return None
    rows = [state[name].tolist() for name in ("length", "closed", "open_start", "longest", "origin")]
    length, closed, open_start, longest, origin = (row[0] for row in rows)
    if any(row.count(row[0]) < len(row) for row in rows) or any(real != [0, 1] for real in span.tolist()):
        return None
    open_blocks = open_span_blocks(window, 1)
    closes = length + 1 - open_start - window.residual >= window.span
    fits = closed + (1 if spec.v.windowed else open_blocks) <= state["block_len"].shape[1]
    if closes or not fits or length < longest or origin > 0:
        return None
    return Rows(length, closed, open_start, open_blocks)


def one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, spec: LayerSpec, scores: Scores, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Write one token of every row and attend.

    Args:
        q: `[B, Hq, 1, D]`, rotated as the layer stores keys.
        k, v: `[B, Hkv, 1, D]`, likewise.
        state: the layer's tensors.
        spec, scores: as in `reference_step`.
        rows: lengths of the rows (`alike`).

    Returns:
        Output `[B, Hq, 1, Dv]` in the query's dtype and fp32 log-sum-exp `[B, Hq, 1]`; None if a number is not finite.
            Nothing is written then.
    """
    if not math.isfinite(q.sum().item() + k.sum().item() + v.sum().item()):
        return None
    real = torch.ones(len(q), 1, dtype=torch.bool)
    tiles = []
    for name, fmt, x in (("k", spec.k, k), ("v", spec.v, v)):
        side = side_of(state, name)
        new = Arrival(x.float(), real, state["length"], real.sum(-1), spec.window.block)
        _store(side, fmt, fmt.quantize_tokens(new, side), spec.window.block, rows)
        tiles.append(_tiles(side, fmt, spec, rows))
    for name in ("length", "columns_seen"):
        state[name].add_(1)
    state["longest"].copy_(state["length"])
    return _attend(q, *tiles, _hidden(state, spec, scores, rows), spec.compute, scores)


def _store(side: State, fmt: Format, token: Operand, block: int, rows: Rows) -> None:
    """Store one token of every row, `[B, Hkv, 1, D]`, in the ring, or in the arena of a format without one."""
    if not fmt.windowed:
        blocks, at = divmod(rows.length - rows.open_start, block)
        return fmt.put(side, token, rows.closed + blocks, at)
    ring = fmt.ring(side)
    at = rows.length % ring.x.shape[2]
    ring.x[:, :, at].copy_(token.x[:, :, 0])
    if ring.scale is not None:
        ring.scale[:, :, at].copy_(token.scales[:, :, 0])


def _tiles(side: State, fmt: Format, spec: LayerSpec, rows: Rows) -> Operand:
    """Return the tokens of one side, `[B, Hkv, n, block, D]`: packed blocks, sinks, open tokens."""
    if not fmt.windowed:
        read = fmt.read(side, rows.closed + rows.open_blocks)
        integers = spec.compute.decode == "int8" and fmt.integer  # sums are exact in any memory order
        return read._replace(x=read.x.float() if integers else read.x.contiguous().float())
    block, first = spec.window.block, rows.closed
    parts = []
    if spec.sink_pool.num:
        sinks = read_sinks(side, fmt)
        parts.append(sinks.map(lambda x: torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))))
    parts.append(_open_tokens(fmt.ring(side), rows, block))
    others = [part.map(lambda x: x.unflatten(2, (-1, block))) for part in parts]
    tiles = first + sum(part.x.shape[2] for part in others)
    x = others[0].x.new_empty((*others[0].x.shape[:2], tiles, *others[0].x.shape[3:]), dtype=torch.float32)
    packed = fmt.read_to(side, x[:, :, :first])
    scales, means = [packed], [packed]
    for part in others:
        end = first + part.x.shape[2]
        x[:, :, first:end].copy_(part.x)
        first = end
    parts = [packed, *others]
    scale = mean = None
    if any(part.scale is not None for part in parts):
        scale = torch.cat([part.scaled().scales for part in parts], 2)
    if packed.mean is not None:
        mean = torch.cat([part.centered().mean for part in parts], 2)
    return Operand(x, scale, mean)


def _open_tokens(ring: Operand, rows: Rows, block: int) -> Operand:
    """Return the ring's tokens from the first open one on, for all tiles of open tokens. Those past the end are any."""

    def unroll(x: torch.Tensor) -> torch.Tensor:
        slots = x.shape[2]
        start = rows.open_start % slots
        end = start + rows.open_blocks * block
        return x[:, :, start:end] if end <= slots else torch.cat([x[:, :, start:], x[:, :, : end - slots]], 2)

    return ring.map(unroll)


def _hidden(state: State, spec: LayerSpec, scores: Scores, rows: Rows) -> torch.Tensor:
    """Return 0 for each token that the new one sees and -inf for others, fp32 `[B, Hkv, n, block]`."""
    block, pool = spec.window.block, spec.sink_pool
    sinks = -(-pool.entries(spec.window) // block)
    dropped = state["dropped"][:, :, : rows.closed + rows.open_blocks]
    tiles = rows.closed + sinks + rows.open_blocks
    hidden = torch.zeros(*dropped.shape[:2], tiles, block)
    before, after = hidden[:, :, : rows.closed], hidden[:, :, tiles - rows.open_blocks :]
    after.flatten(2)[..., rows.length + 1 - rows.open_start :] = -torch.inf
    if dropped.any():
        bits = bits_to_bool(dropped)
        before.masked_fill_(bits[:, :, : rows.closed], -torch.inf)
        kept = bits[:, :, rows.closed :]
        after[:, :, : kept.shape[2]].masked_fill_(kept, -torch.inf)
    if pool.num:
        table = side_of(state, "sink")
        there = (table["born"] > 0) & (table["written"] == 0)
        within = hidden[:, :, rows.closed : rows.closed + sinks].flatten(2)
        within.fill_(-torch.inf)[..., : there.shape[2]].masked_fill_(there, 0.0)
    if scores.window:
        gone = (
            last_hidden(torch.tensor(rows.length), scores.window).item() + 1 - (rows.open_start - rows.closed * block)
        )
        hidden.flatten(2)[..., : max(0, gone)] = -torch.inf
    return hidden


def _attend(
    q: torch.Tensor, k: Operand, v: Operand, hidden: torch.Tensor, compute: Compute, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.attention.attend` for one query per row.

    Args:
        q: `[B, Hq, 1, D]`.
        k, v: fp32 `[B, Hkv, n, block, D]`.
        hidden: result of `_hidden`."""
    heads, tiles, block = k.x.shape[1:4]
    exact = (q.float() * scores.scale).view(len(q), heads, -1, q.shape[-1])
    integers = compute.decode == "int8"
    # scores `[B, Hkv, G, n, block]`, as products of `[G, D]` and `[D, n * block]`
    if integers:
        k = k if k.scale is not None else int8_tokens(k.x, compute.qk_levels)
        coded = int8_tokens(exact, compute.decode_levels)
        s = coded.x.float() @ k.x.float().flatten(2, 3).mT
        s = s.mul_(coded.scales[..., None]).mul_(k.scales.flatten(2)[:, :, None]).unflatten(-1, (tiles, block))
        if k.mean is not None:
            s.add_((exact.double() @ k.mean[:, :, :, 0].double().mT).float()[..., None])
    else:
        s = (exact @ k.dequantize().flatten(2, 3).mT).unflatten(-1, (tiles, block))
    if scores.softcap:
        s = s.div_(scores.softcap).tanh_().mul_(scores.softcap)
    s.add_(hidden[:, :, None])

    # weights and row sum of each tile, relative to its maximum; then the factor that rescales each tile to the maximum
    top = s.amax(-1)
    top = top.cummax(-1).values if compute.softmax == "sas" else top
    s.sub_(torch.where(top.isneginf(), 0.0, top)[..., None])
    p = sas_exp(s, compute.sas_threshold) if compute.softmax == "sas" else s.exp_()
    last, sinks = top.amax(-1), None
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, heads, -1)
        last = torch.maximum(last, sinks)
    rescale = (top - last[..., None]).exp_()
    if integers and compute.pv == "int8":
        v = v if v.scale is not None else int8_tokens(v.x, compute.pv_levels)
        sums = None if compute.round_sum else p.sum(-1)
        w = p * v.scales[:, :, None]
        scale = w.amax(-1) / compute.pv_levels
        w = w.div_(torch.where(scale == 0, 1.0, scale)[..., None]).round_()
        if sums is None:
            none = v.scales[:, :, None] == 0
            sums = torch.where(none, p, w * scale[..., None] / torch.where(none, 1.0, v.scales[:, :, None])).sum(-1)
        out = (w.transpose(2, 3) @ v.x.float()).mul_(scale.transpose(2, 3)[..., None])
    else:
        sums = p.sum(-1)
        out = p.transpose(2, 3) @ v._replace(mean=None).dequantize()
    total = (sums * rescale).sum(-1)
    total = total if sinks is None else total + torch.exp(sinks - last)
    out = out.mul_(rescale.transpose(2, 3)[..., None]).sum(2) / total[..., None]
    lse = (last + total.log()).flatten(1, 2)
    return out.flatten(1, 2).unsqueeze(2).to(q.dtype), lse[..., None]
