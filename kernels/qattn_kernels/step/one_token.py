"""A step of one token per row on a CPU, in plain PyTorch: what `step.reference` computes, bit for bit.

The host reads the lengths of the rows. Tokens are therefore slices of the state, and padding, longer calls and rows of
other lengths need no operations. `rows_alike` says which calls qualify. `step.reference` computes all others, such as a
step that closes a block."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from qattn_kernels.formats import Arrival, Format, Operand
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.table import read_sinks
from qattn_kernels.reference.finite_queries import attend_finite
from qattn_kernels.reference.rows import bits_to_bool, open_span_blocks
from qattn_kernels.reference.tiles import joined_side, last_hidden


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


def _computes(spec: LayerSpec, scores: Scores) -> bool:
    """Return whether `one_token` computes steps of a layer."""
    pool = spec.sink_pool
    if spec.latent or spec.sparsity.tau > 0 or spec.v.smoothed or pool.select == "attention":
        return False
    if pool.num and (scores.window or not spec.v.windowed):
        return False
    return all(fmt.windowed or fmt.keeps("put", "write") for fmt in (spec.k, spec.v))


class Tokens(NamedTuple):
    """Queries, keys and values of one token per row.

    Attributes:
        q: fp32 `[B, Hq, 1, D]`, multiplied by the softmax scale.
        coded: `q` in INT8, for integer products; else None.
        k, v: `[B, Hkv, 1, D]` in the form of open tokens.
    """

    q: torch.Tensor
    coded: Operand | None
    k: Operand
    v: Operand


def rows_alike(state: State, span: torch.Tensor, spec: LayerSpec, scores: Scores) -> Rows | None:
    """Return the lengths of the rows if `one_token` computes the step of a call with one column, else None.

    It does on a CPU, if all rows are equally long and without short blocks, each gets one token, and no block closes.
    After a crop the rows first grow back to their longest length, so that no removed token follows the end."""
    if span.device.type != "cpu" or not _computes(spec, scores):
        return None
    window = spec.window
    rows = [state[name].tolist() for name in ("length", "closed", "open_start", "longest", "origin")]
    length, closed, open_start, longest, origin = (row[0] for row in rows)
    if any(row.count(row[0]) < len(row) for row in rows) or any(real != [0, 1] for real in span.tolist()):
        return None
    open_blocks = open_span_blocks(window, 1)
    closes = length + 1 - open_start - window.residual >= window.span
    fits = closed + open_blocks <= state["block_len"].shape[1]
    if closes or not fits or length < longest or origin > 0:
        return None
    return Rows(length, closed, open_start, open_blocks)


def one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, spec: LayerSpec, scores: Scores, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Write one token of every row and attend.

    Args:
        q: `[B, Hq, 1, D]`, rotated as the layer stores keys.
        k, v: `[B, Hkv, 1, D]`, rotated in the same way.
        state: the layer's tensors.
        spec, scores: as in `reference_step`.
        rows: lengths of the rows (`rows_alike`).

    Returns:
        Output `[B, Hq, 1, Dv]` in the query's dtype and fp32 log-sum-exp `[B, Hq, 1]`; None if a number is not finite.
            Nothing is written then.
    """
    tokens = _quantized(q, k, v, state, spec, scores.scale)
    if tokens is None:
        return None
    keys = _stored(side_of(state, "k"), spec.k, tokens.k, spec, rows)
    values = _stored(side_of(state, "v"), spec.v, tokens.v, spec, rows)
    for name in ("length", "columns_seen"):
        state[name].add_(1)
    state["longest"].copy_(state["length"])
    hide = partial(_hide, state, spec, scores, rows)
    out, lse = attend_finite(tokens.q, tokens.coded, keys, values, hide, spec.compute, scores)
    return out.to(q.dtype), lse


def _quantized(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, spec: LayerSpec, scale: float
) -> Tokens | None:
    """Return the tokens of a call as products and formats take them, or None if a number is not finite."""
    exact, int8 = q.float().mul(scale), spec.compute.decode == "int8"
    levels = spec.compute.decode_levels, *map(_token_levels, (spec.k, spec.v))
    if int8 and None not in levels and q.shape[3] == v.shape[3]:  # all at once
        heads = q.shape[1], k.shape[1], v.shape[1]
        coded = int8_tokens(torch.cat([exact, k, v], 1), _levels(levels, heads))
        if not math.isfinite(coded.scales.sum().item()):
            return None
        return Tokens(exact, *map(Operand, *(x.split_with_sizes(heads, 1) for x in (coded.x, coded.scales))))
    if not math.isfinite(q.sum().item() + k.sum().item() + v.sum().item()):
        return None
    real, count = _ones(len(q))
    arrivals = (Arrival(x.float(), real, state["length"], count, spec.window.block) for x in (k, v))
    sides = ((spec.k, side_of(state, "k")), (spec.v, side_of(state, "v")))
    stored = (fmt.quantize_tokens(new, side) for (fmt, side), new in zip(sides, arrivals, strict=True))
    return Tokens(exact, int8_tokens(exact, spec.compute.decode_levels) if int8 else None, *stored)


def _token_levels(fmt: Format) -> int | None:
    return fmt.token_levels if fmt.core.keeps("token_levels", "quantize_tokens") else None


@lru_cache(maxsize=64)
def _levels(levels: tuple[int, ...], heads: tuple[int, ...]) -> torch.Tensor:
    """Return fp32 `[sum(heads), 1]`: each of `levels`, repeated for its number of heads."""
    with torch.inference_mode(False):  # it outlives the call
        counts = torch.tensor(heads, device="cpu")
        return torch.tensor(levels, dtype=torch.float32, device="cpu").repeat_interleave(counts)[:, None]


@lru_cache(maxsize=64)
def _ones(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `Arrival.real` and `Arrival.count` of one token per row."""
    with torch.inference_mode(False):  # they outlive the call
        return torch.ones(rows, 1, dtype=torch.bool, device="cpu"), torch.ones(rows, dtype=torch.int32, device="cpu")


def _store(side: State, fmt: Format, token: Operand, block: int, rows: Rows) -> None:
    """Store one token of every row, `[B, Hkv, 1, D]`, in the ring, or in the arena of a format without one."""
    if not fmt.windowed:
        blocks, at = divmod(rows.length - rows.open_start, block)
        return fmt.put(side, token, rows.closed + blocks, at)
    ring = fmt.ring(side)
    at = rows.length % ring.x.shape[2]
    ring.x.narrow(2, at, 1).copy_(token.x)
    if ring.scale is not None:
        ring.scale.narrow(2, at, 1).copy_(token.scales)


def _stored(side: State, fmt: Format, token: Operand, spec: LayerSpec, rows: Rows) -> Operand:
    """Store one token of every row and return all tokens of the side, `[B, Hkv, n, block, D]`."""
    _store(side, fmt, token, spec.window.block, rows)
    if not fmt.windowed:
        return fmt.read(side, rows.closed + rows.open_blocks)
    open_ = _open_tokens(side, fmt, spec, rows).map(lambda x: x.unflatten(2, (-1, spec.window.block)))
    return joined_side(fmt.read(side, rows.closed), open_)


def _open_tokens(side: State, fmt: Format, spec: LayerSpec, rows: Rows) -> Operand:
    """Return the sinks, filled up to whole tiles, and the ring from the first open token on, `[B, Hkv, m, D]`."""
    ring, block = fmt.ring(side), spec.window.block
    slots = ring.x.shape[2]
    start = rows.open_start % slots
    end = start + rows.open_blocks * block
    runs = [_run(ring, start, min(end, slots))]
    if end > slots:
        runs.append(_run(ring, 0, end - slots))
    if spec.sink_pool.num:
        sinks = read_sinks(side, fmt)
        runs = [sinks] * max(1, block // sinks.x.shape[2]) + runs
    if len(runs) == 1:
        return runs[0]
    scale = None if ring.scale is None else torch.cat([run.scales for run in runs], 2)
    return Operand(torch.cat([run.x for run in runs], 2), scale)


def _run(tokens: Operand, first: int, end: int) -> Operand:
    """Return the tokens from `first` to `end` (exclusive)."""
    x, scale = tokens.x.narrow(2, first, end - first), tokens.scale
    return Operand(x, None if scale is None else scale.narrow(2, first, end - first))


def _hide(state: State, spec: LayerSpec, scores: Scores, rows: Rows, s: torch.Tensor) -> None:
    """Set the scores `s` `[B, Hkv, G, n, block]` of tokens that the new one does not see to -inf."""
    block, flat = spec.window.block, s.flatten(3)
    if state["nonfinite"].any():
        s.masked_fill_(_masked(state, spec, rows).unsqueeze(2), -torch.inf)
    elif spec.sink_pool.num:
        _hide_copies(state, rows.closed * block, block, flat)
    past_end = rows.open_start + rows.open_blocks * block - (rows.length + 1)
    flat.narrow(3, flat.shape[3] - past_end, past_end).fill_(-torch.inf)
    if scores.window:
        first = rows.open_start - rows.closed * block  # row position of the first token
        before = int(last_hidden(torch.tensor(rows.length, device=s.device), scores.window)) + 1
        flat.narrow(3, 0, max(0, before - first)).fill_(-torch.inf)


def _masked(state: State, spec: LayerSpec, rows: Rows) -> torch.Tensor:
    """Return bool `[B, Hkv, n, block]`: tokens that are masked or whose other copy is read."""
    bits = bits_to_bool(state["dropped"].narrow(2, 0, rows.closed + rows.open_blocks))
    if not spec.sink_pool.num:
        return bits
    gone, block = state["sink.born"] <= state["sink.written"], spec.window.block  # free places too
    sinks = pad(gone, (0, -gone.shape[2] % block), value=True).unflatten(2, (-1, block))
    return torch.cat([bits.narrow(2, 0, rows.closed), sinks, bits.narrow(2, rows.closed, rows.open_blocks)], 2)


def _hide_copies(state: State, packed: int, block: int, s: torch.Tensor) -> None:
    """Hide the tokens of `_masked` if all are finite: the copy of each sink in its block, or its place in the table if
    the copy is read or the place is free.

    Args:
        packed: tokens in packed blocks. They come first in the scores `s` `[B, Hkv, G, tokens]`, then the sinks."""
    born, written, slot = (state[f"sink.{name}"] for name in ("born", "written", "slot"))
    places = slot.shape[2]
    own = torch.arange(packed, packed + places, dtype=slot.dtype, device=slot.device)
    hidden = torch.where(born <= written, own, slot)
    s.scatter_(3, hidden.long().unsqueeze(2).expand(-1, -1, s.shape[2], -1), -torch.inf)
    s.narrow(3, packed + places, -places % block).fill_(-torch.inf)
