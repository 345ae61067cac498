"""One call of the operator, with its tensors in the form that launchers take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from qattn_kernels.chip import chip_of
from qattn_kernels.formats.contract import jit_of, side_tensors, sink_tensors
from qattn_kernels.launch.constants import Sizes, sizes_of
from qattn_kernels.launch.driver import driver
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.step import Step
from qattn_kernels.layout import ROW_FIELDS, BlockState, RowState, State
from qattn_kernels.reference.rows import open_span_blocks


class Table(NamedTuple):
    """The sink table (`ops/sink_pool/table.py`): the tensors `sink.*` of a layer.

    Inside kernels it holds the entries of one row and head, `[ENTRIES]` each."""

    pos: Any
    slot: Any
    born: Any
    evicted: Any
    written: Any
    norm: Any


class SinkTensors(NamedTuple):
    """The sink pool of a call; all None without a pool.

    Attributes:
        k, v: keys and values of all sinks (`formats.contract.Sinks`).
        table: the `Table` of all heads.
        moved: for short calls, int32 `[B, H, 2 * sinks]`: slots of the tokens that the close moves into or out of the
            pool.
        chosen: for long calls, uint8: one bit per token of the open span, set if the pool takes it.
    """

    k: Any = None
    v: Any = None
    table: Any = None
    moved: Any = None
    chosen: Any = None


class LayerTensors(NamedTuple):
    """The state of a layer, as kernels take it.

    Attributes:
        rows, blocks: the fields of a `RowState` and of a `BlockState`.
        k, v: tensors of the two sides.
        k_mean: fp32 `[B, H, D]`, mean keys of the rows; a placeholder without smoothing.
        sinks: the `SinkTensors`.
        pages: the page table of a page pool, see `jit.rows.block_at`; else None.
    """

    rows: Any
    blocks: Any
    pages: Any
    k: Any
    v: Any
    k_mean: Any
    sinks: Any


class Call(NamedTuple):
    """One call of the operator.

    Attributes:
        query, key, value: new tokens, last dimension contiguous.
        span: int32, the call's mask, as in `Step`.
        state: the layer's tensors.
        spec: the layer's formats and arithmetic.
        scores: scale, cap, window and sinks of the scores.
        sizes: compile-time constants.
        k, v: tensors of the two sides.
        rows: int32 `[B, ROW_FIELDS]`, the append stores each `Row` here for the kernels after it.
        sinks: the `SinkTensors`.
        call_mean: fp32 `[B, H, D]`, mean key that a long call subtracts from smoothed keys; a placeholder without
            smoothing.
        pages: with a page pool, the int32 `[B, NB]` page of each block, the number of pages, and the blocks per row
            with mask bits; else None.
        turned: the rotated queries that a decode reads, in a buffer that the append fills; without rotation, `query`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    span: torch.Tensor
    state: State
    spec: LayerSpec
    scores: Scores
    sizes: Sizes
    k: tuple
    v: tuple
    rows: torch.Tensor
    sinks: SinkTensors
    call_mean: torch.Tensor
    pages: tuple[torch.Tensor, int, int] | None
    turned: torch.Tensor

    @property
    def k_mean(self) -> torch.Tensor:
        """Mean keys of the rows; a placeholder without smoothing."""
        return self.state.get("k.mean", self.call_mean)

    @property
    def batch(self) -> int:
        return self.key.shape[0]

    @property
    def tokens(self) -> int:
        return self.key.shape[2]

    @property
    def blocks(self) -> int:
        """Capacity of a row in blocks."""
        return (self.state["block_len"] if self.pages is None else self.pages[0]).shape[1]

    @property
    def source(self) -> tuple:
        """A `jit.tokens.Source` as a plain tuple, which Triton processes faster than a named tuple."""
        key = (self.key, self.state["k.equalizer"][0]) if self.sizes.K.EQUALIZED else self.key
        return key, self.value, self.key.stride()[:3], self.value.stride()[:3]

    @property
    def layer(self) -> LayerTensors:
        """The layer's tensors, with rows and blocks as plain tuples."""
        rows, blocks = (tuple([self.state[name] for name in kind._fields]) for kind in (RowState, BlockState))
        return LayerTensors(rows, blocks, self.pages, self.k, self.v, self.k_mean, self.sinks)

    @property
    def spans(self) -> tuple:
        """The call's mask and its row stride; the stride is 0 if one row serves all."""
        return self.span, 0 if self.span.shape[0] == 1 else self.span.stride(0)


def _multiplies_int8(spec: LayerSpec, short: bool) -> bool:
    """Return whether products of a short or long call are INT8."""
    if not short:
        return spec.compute.prefill == "int8"
    splits = not spec.latent and any(jit_of(fmt).splits_int8 for fmt in (spec.k, spec.v))
    return splits or spec.compute.decode == "int8"


def _on_device(sizes: Sizes, spec: LayerSpec, device: torch.device, short: bool) -> Sizes:
    """Return the constants of a short or long call with what depends on the GPU."""
    chip = chip_of(device)
    shifts = (spec.k.core.fp8 or spec.v.core.fp8) and not chip.fp8
    # CUDA graphs hold such launches from 12.3 on, and `driver` is None before 12.4. On a CPU kernels are only compiled.
    launches = device.type != "cuda" or driver() is not None
    return sizes._replace(SHIFTS_FP8=shifts, DEPENDENT=short and chip.dependent and launches and not sizes.PLAIN)


def make_call(step: Step) -> Call:
    """Return the `Call` for a step."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in step[:3])
    state, spec, scores, table = step.memory.state, step.memory.spec, step.scores, step.memory.table
    batch, heads, tokens, dim = key.shape
    short = tokens <= SHORT_CALL
    int8, columns = _multiplies_int8(spec, short), tokens if short else 1
    asks = scores.softcap != 0, scores.window != 0, scores.window < 0
    sizes = sizes_of(spec, heads, query.shape[1] // heads, dim, columns, int8, *asks, value.shape[3])
    sizes = _on_device(sizes, spec, key.device, short)._replace(PAGED=table is not None)
    pages = None if table is None else (table, state["block_len"].shape[1], state["dropped"].shape[2])
    rows = torch.empty((batch, ROW_FIELDS), dtype=torch.int32, device=key.device)
    k, v = (side_tensors(state, side, fmt, heads) for side, fmt in (("k", spec.k), ("v", spec.v)))
    sinks = _sinks(state, spec, sizes, batch, tokens, key.device) if spec.sink_pool.num else SinkTensors()
    call_mean = state["length"]
    if sizes.K.SMOOTH:
        call_mean = state["k.mean"].new_empty((batch, heads, dim)) if not short else state["k.mean"]
    return Call(query, key, value, step.span, state, spec, scores, sizes, k, v, rows, sinks, call_mean, pages, query)


def _sinks(state: State, spec: LayerSpec, sizes: Sizes, batch: int, tokens: int, device: torch.device) -> SinkTensors:
    """Return the sink pool of a call of `tokens` tokens, with uninitialised outputs."""
    table = Table(*(state[f"sink.{name}"] for name in Table._fields))
    sides = sink_tensors(state, "k"), sink_tensors(state, "v")
    if tokens <= SHORT_CALL:
        shape: tuple[int, ...] = (batch, sizes.H, 2 * sizes.SINKS)
        return SinkTensors(*sides, table, moved=torch.empty(shape, dtype=torch.int32, device=device))
    shape = (batch, sizes.H, open_span_blocks(spec.window, tokens), spec.window.block // 8)
    return SinkTensors(*sides, table, chosen=torch.empty(shape, dtype=torch.uint8, device=device))
