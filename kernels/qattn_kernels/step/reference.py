"""One call of a layer in plain PyTorch: the specification of `step.kernels`."""

from __future__ import annotations

from functools import partial

import torch

from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.skip_counts import add_skip_counts
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layout import State
from qattn_kernels.ops.append.reference import append
from qattn_kernels.ops.decode.reference import decode
from qattn_kernels.ops.prefill.reference import packed_past, prefill
from qattn_kernels.ops.rotate.reference import rotate, rotate_back, rotated
from qattn_kernels.ops.sink_pool.mass import given
from qattn_kernels.ops.sink_pool.reference import compete
from qattn_kernels.ops.sink_pool.table import settle
from qattn_kernels.reference.query_parts import in_columns, query_parts
from qattn_kernels.reference.rows import build_open_span, fitting, real_first
from qattn_kernels.step.one_token import one_token, rows_alike


def reference_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    span: torch.Tensor,
    state: State,
    spec: LayerSpec,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new tokens, pack full blocks and attend: all operations of one call, in order.

    Calls of at most `SHORT_CALL` tokens append first and read the cache as single steps would (decode). Longer calls
    attend to their own tokens as the method's prefill does. Arguments and results are as in `step.operator.attend`.
    """
    q, k, v = rotated(q, k, v, spec.compute, state, partial(map, rotate))
    rows = rows_alike(state, span, spec, scores) if q.shape[2] == 1 else None
    short = None if rows is None else one_token(q, k, v, state, spec, scores, rows)
    out, lse = short or general_step(q, k, v, span, state, spec, scores)
    return out if spec.compute.rotate_v == "none" else rotate_back(out), lse


def general_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: torch.Tensor, state: State, spec: LayerSpec, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `reference_step` for any call, on tensors that are already rotated. The output is not rotated back."""
    given_span = span.expand(q.shape[0], 2)
    span = fitting(state, spec.window, given_span)
    count = span[:, 1].contiguous()
    state["overflow"].add_(given_span[:, 1] - count)
    parts = query_parts(q, span, state["length"])
    k, v = real_first(k, span), real_first(v, span)
    open_span = build_open_span(state, spec, k, v, count)
    short = q.shape[2] <= SHORT_CALL
    past = None if short else packed_past(state, spec)
    if spec.sink_pool.num:
        if spec.sink_pool.select == "attention":
            open_span = open_span._replace(given=given(parts[0].q, parts[0].pos, state, spec.window, open_span, scores))
        open_span = compete(state, spec, open_span)
    append(state, spec, open_span, span, q.shape[2])
    if past is None:
        results = decode(parts, state, spec, open_span, scores)
    else:
        results = prefill(parts, past, state, spec, open_span, scores)
    if spec.sink_pool.num:
        settle(state, open_span.closed)
    if results[0].skip_counts is not None:
        add_skip_counts(state, results[0].skip_counts)
    return in_columns(parts, results, q.dtype)
