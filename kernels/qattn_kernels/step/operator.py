"""The registered operators: append, pack and attend in one call. Only they write a layer's state.

A compiled step may change an arena through a single operator only. Inductor copies a tensor that two operators change
in sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from qattn_kernels.launch.plan import planned
from qattn_kernels.layer.arena import decode_layout, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layer.step import Arena, Step
from qattn_kernels.layout import State
from qattn_kernels.ops.crop.front import drop_front, left_behind
from qattn_kernels.step.reference import reference_step


class CapacityError(ValueError):
    """A call does not fit the capacity of its cache. Nothing was written."""


def check_capacity(state: State, spec: LayerSpec, span: torch.Tensor) -> None:
    """Raise `CapacityError` if a call would overflow. Checks on a CPU only.

    On other devices a step must not wait for lengths. The caller then keeps an upper bound, as `QAttnLayer` does.
    Tokens beyond the capacity are dropped and counted (`overflow`)."""
    if span.device.type != "cpu":
        return
    block = spec.window.block
    closed, length, start = (state[name].tolist() for name in ("closed", "length", "open_start"))
    spans = span.tolist() * (len(length) if len(span) == 1 else 1)
    need = max(a * block + b - c + new for a, b, c, (_, new) in zip(closed, length, start, spans, strict=True))
    have = state["block_len"].shape[1] * block
    if need > have:
        raise CapacityError(
            f"the cache holds {have} tokens a row and this call needs {need}; nothing was written. Make it with a "
            "larger max_cache_len; a cache without one grows, but not inside a compiled call"
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: torch.Tensor,
    arena: torch.Tensor,
    layout: str,
    blocks: int,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    past: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new keys and values, pack full blocks, and attend.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, T, D]`.
        span: int32 `[B or 1, 2]`, first real column of the new tokens, and their count.
        arena: uint8, the layer's whole state, changed in place (`layer.arena`).
        layout: `Layout.encode()` of the layer's sizes and spec.
        blocks: capacity in blocks.
        scale, softcap, window, sinks: see `Scores`.
        past: upper bound of the blocks that any row had closed before the call, for example the capacity.

    Returns:
        Output `[B, Hq, T, Dv]` in the query's dtype, stored as `[B, T, Hq, Dv]`, and fp32 log-sum-exp `[B, Hq, T]`.
            Padding before a row's first token has zeros. Padding after a row's last token sees all its tokens, or
            nothing in a call of one column.

    Raises:
        CapacityError: on a CPU, if the tokens do not fit; nothing was written.
    """
    where = decode_layout(layout, key.shape[0], blocks)
    scores = Scores(scale, softcap, window, sinks)
    return attend_directly(Step(query, key, value, span, Arena(arena, where, layout), scores, past))


def needs_dispatch(query: torch.Tensor) -> bool:
    """Return whether an eager call must go through the registered operator.

    True for fake tensors, tensors without data, and under a dispatch mode."""
    return type(query) is not torch.Tensor or query.is_meta or _get_current_dispatch_mode() is not None


def attend_step(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attend` on a step over an arena, through PyTorch's dispatcher only if that is needed."""
    return attend(*flat(step)) if needs_dispatch(step.query) else attend_directly(step)


def flat(step: Step) -> tuple[Any, ...]:
    """Return a step over an arena as the arguments of `attend`."""
    query, key, value, span, memory, scores, past = step
    text, blocks = memory.plan_key
    return query, key, value, span, *memory.buffers, text, blocks, *scores, past


def attend_directly(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attend` without PyTorch's dispatcher, which costs the host some microseconds per layer.

    Results and errors are those of `attend`. A step over a page pool has at most `SHORT_CALL` tokens per row."""
    if torch.is_grad_enabled():  # no gradients here, and state must never require one
        with torch.no_grad():
            return attend_directly(step)
    query, key, value, span, memory, scores, _ = step
    if memory.spec.impl == "triton":
        return _planned(step)
    state = memory.state
    check_capacity(state, memory.spec, span)
    autocast = torch.is_autocast_enabled(query.device.type)  # integer products sum exactly in fp32 only
    with torch.autocast(query.device.type, enabled=False) if autocast else nullcontext():
        out, lse = reference_step(query, key, value, span, state, memory.spec, scores)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _planned(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step in kernels, with the launch plan of an earlier step of the same shapes."""
    query, key, value, span, memory, (scale, softcap, window, sinks), past = step
    buffers, table = memory.buffers, memory.table
    if table is None and span.device.type == "cpu":
        check_capacity(memory.state, memory.spec, span)
    tensors: tuple[torch.Tensor, ...] = (query, key, value, span)
    if table is not None:
        tensors += (table,)
    if sinks is not None:
        tensors += (sinks,)
    shapes = [(x.shape, x.stride(), x.dtype) for x in tensors]
    known = past if key.shape[2] > SHORT_CALL else 0
    plan = memory.plan_key, scale, softcap, window, known, query.device, *shapes
    out, lse = planned(plan, buffers + tensors, compute, step, arenas=len(buffers))
    return out, lse


def compute(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels of a step. `_attend` describes the results."""
    from qattn_kernels.step import kernels  # imported here: loads Triton

    with torch.cuda.device_of(step.query):  # Triton launches on the current device, not on the tensors' device
        return kernels.run_step(step)


def _attend_and_keep(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `_attend` in a compiled step, with two more arguments.

    Also returns the first `keep` bytes of the arena as they were before, for `_attend_again`.

    Args:
        sliding_window: tokens of a window, or 0. Blocks that left the window are dropped from the layer first
            (`ops.crop.front`), because a compiled step cannot ask whether the layer is full.
        keep: number of bytes to return, uint8 `[keep]`.
    """
    *call, sliding_window, keep = arguments
    key, arena, layout, blocks = call[1], call[4], call[5], call[6]
    if sliding_window:
        where = decode_layout(layout, key.shape[0], blocks)
        state = views(arena, where)
        drop_front(state, layer_tensors(*where), left_behind(state, where.spec.window, sliding_window))
    before = beginning(arena, keep)
    return *_attend(*call), before


def _attend_again(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `_attend` with other queries over the tokens that an earlier call wrote, with one more argument.

    The arena ends unchanged, so this operator is not declared to mutate it.

    Args:
        before: the arena's first bytes before the earlier call (`layer.arena.rewritten_bytes`). They are restored, and
            the same tokens are written again.
    """
    *call, before = arguments
    put_back(call[4], before)
    return _attend(*call)


def put_back(arena: torch.Tensor, before: torch.Tensor) -> None:
    """Restore the beginning of a layer's arena from the output of `beginning`."""
    arena[: before.shape[0]].copy_(before)


def _beginning(arena: torch.Tensor, n_bytes: int) -> torch.Tensor:
    """Return a copy of the first bytes of a layer's arena, uint8 `[n_bytes]`.

    Registered as an operator. Inductor replaces a plain copy by a view, and then copies the whole arena before the
    operator that changes it."""
    return arena[:n_bytes].clone()


# registered by hand: `torch.library.custom_op` costs several times as much per call
LIBRARY = torch.library.Library("qattn", "FRAGMENT")
CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor span, Tensor{0} arena, str layout, SymInt blocks, float scale, "
    "float softcap, int window, Tensor? sinks, SymInt past"
)


def _define(name: str, signature: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Register an operator without gradients. `shapes` computes the fake results."""
    LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"qattn::{name}", shapes, lib=LIBRARY)
    return getattr(torch.ops.qattn, name).default


def _shapes(query, key, value, *others):
    batch, heads, tokens = query.shape[:3]
    out = query.new_empty((batch, tokens, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, tokens), dtype=torch.float32)


RESULTS = "-> (Tensor, Tensor)"
# the functions above document arguments, results and errors
attend = _define("attend", f"({CALL.format('(a!)')}) {RESULTS}", _attend, _shapes)
attend_and_keep = _define(
    "attend_and_keep",
    f"({CALL.format('(a!)')}, int sliding_window, SymInt keep) -> (Tensor, Tensor, Tensor)",
    _attend_and_keep,
    lambda *call: (*_shapes(*call), call[4].new_empty((call[-1],))),
)
attend_again = _define("attend_again", f"({CALL.format('')}, Tensor before) {RESULTS}", _attend_again, _shapes)
beginning = _define(
    "beginning", "(Tensor arena, SymInt n_bytes) -> Tensor", _beginning, lambda arena, n: arena.new_empty((n,))
)
