"""One call of a layer in Triton kernels, one launch per operation. `step.reference` is the specification."""

from __future__ import annotations

import torch

from qattn_kernels.launch.call import Call, make_call
from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.step import Step, Tensors
from qattn_kernels.layout import State
from qattn_kernels.ops.append.launch import append, append_long, call_mean, empty_unpacked, finish, rank, unpack_past
from qattn_kernels.ops.decode.launch import appends, decode
from qattn_kernels.ops.latent import launch as latent
from qattn_kernels.ops.prefill.launch import prefill, with_room
from qattn_kernels.ops.rotate import launch as rotate
from qattn_kernels.ops.rotate.reference import rotated
from qattn_kernels.ops.sink_pool.launch import compete, restore


def fused_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: torch.Tensor,
    state: State,
    spec: LayerSpec,
    scores: Scores,
    past: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `run_step` on state tensors that the caller holds. Arguments and results are those of
    `step.reference.reference_step`; `past` as in `Step`."""
    return run_step(Step(query, key, value, span, Tensors(state, spec), scores, past))


def run_step(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new tokens, pack full blocks and attend, in kernels.

    Calls of at most `SHORT_CALL` tokens append first and read the cache as single steps would (decode). Longer calls
    attend to their own tokens as the method's prefill does. Results are those of `step.operator.attend`."""
    spec, scores = step.memory.spec, step.scores
    if step.query.shape[2] <= SHORT_CALL:
        call = rotate.inside(make_call(step))
        if not appends(call):
            append(call)
        return latent.decode(call) if spec.latent else decode(call)
    query, key, value = rotated(*step[:3], spec.compute, step.memory.state, rotate.rotate)
    call = make_call(step._replace(query=query, key=key, value=value))
    unpacked = write_long(call, step.past)
    if spec.latent:
        finish(call)
        out, lse = latent.prefill(call, unpacked)
    else:
        unpacked = with_room(unpacked, spec, scores)
        finish(call, unpacked)
        out, lse = prefill(call.query, unpacked, spec, scores)
    return rotate.rotated_back(out, spec.compute), lse


def write_long(call: Call, past: int | None) -> UnpackedKV:
    """Write the tokens of a long call and pack full blocks. Returns the keys and values that its queries see, unpacked.

    `past`: upper bound of the packed blocks to unpack per row. None returns zero slots, for callers that do not read
    them."""
    unpacked = empty_unpacked(call, past)
    unpack_past(call, unpacked, past or 0)
    restore(call, unpacked, past or 0)
    compete(call)
    rank(call)
    call_mean(call)
    append_long(call, unpacked)
    return unpacked
