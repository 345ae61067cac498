"""A whole prompt with unquantized arithmetic (bf16/fp16): kernels write the cache, PyTorch's SDPA attends.

cuDNN's bf16 attention is faster than the kernels here. For a prompt without padding into an empty cache it computes the
same. If the format quantizes only when a block closes, SDPA attends to the model's keys and values. Otherwise it
attends to the unpacked keys and values that the kernels write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.step import Step
from qattn_kernels.ops.rotate.reference import rotated, stored
from qattn_kernels.step.operator import check_capacity

if TYPE_CHECKING:
    from qattn_kernels.launch.call import Call

# Use SDPA from this many rows x tokens^2 on: below it, cuDNN's planning of a new shape costs more than it saves.
WORTH = 2**26


def by_sdpa(step: Step) -> bool:
    """Return whether `attend_prompt` computes the same as the kernels, and faster, for a prompt without padding into an
    empty cache."""
    query, key, value, spec = *step[:3], step.memory.spec
    exact = spec.compute.prefill == "model" and spec.compute.softmax == "exact"
    alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape and not spec.latent
    worth = query.shape[0] * query.shape[2] ** 2 >= WORTH
    return spec.impl == "triton" and exact and step.scores.plain and alike and worth and _fast(query, key, value)


def sees_raw(spec: LayerSpec) -> bool:
    """Return whether a prompt attends to keys and values exactly as the model produced them."""
    return spec.k.exact_prompts and spec.v.exact_prompts


def _fast(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether SDPA would choose cuDNN by itself. Always true on a CPU, for tests.

    Other SDPA backends are no faster than the kernels here. Forcing a backend would switch it for all threads."""
    if query.device.type == "cpu":
        return True
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


@torch.no_grad()
def attend_prompt(step: Step) -> torch.Tensor:
    """Write a prompt and attend. Requires `by_sdpa`.

    Returns:
        `[B, Hq, T, D]` in the query's dtype.

    Raises:
        CapacityError: on a CPU, if the tokens do not fit; nothing was written.
    """
    from qattn_kernels.ops.append.launch import append_long, empty_unpacked  # imported here: loads Triton
    from qattn_kernels.ops.prefill.launch import prefill
    from qattn_kernels.ops.rotate.launch import rotate, rotated_back

    query, key, value, _, memory, scores, _ = step
    state, spec = memory.state, memory.spec
    raw, compute = sees_raw(spec), spec.compute

    def with_sdpa(unpacked: UnpackedKV) -> torch.Tensor:
        if raw:
            return _causal(query, key, value, scores)
        seen_k, seen_v = (x[:, :, : query.shape[2]] for x in (unpacked.k, unpacked.v))
        return rotated_back(_causal(q, seen_k, seen_v, scores), compute)

    def with_kernels(call: Call, unpacked: UnpackedKV) -> torch.Tensor:
        turned = q
        if raw:
            state["nonfinite"].zero_()  # the cache was empty, and the tokens are counted again
            append_long(call, unpacked := empty_unpacked(call, 0))
            turned, *_ = rotated(query, key, value, compute, state, rotate)
        return rotated_back(prefill(turned, unpacked, spec, scores)[0], compute)

    with torch.cuda.device_of(query):
        if raw:  # SDPA reads the query unrotated; `with_kernels` rotates it if needed
            q, (k, v) = query, stored(key, value, compute, state, rotate)
        else:
            q, k, v = rotated(query, key, value, compute, state, rotate)
        turned = step._replace(query=q, key=k, value=v)
        return write_and_attend(turned, None if raw else 0, with_sdpa, with_kernels)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores.scale, enable_gqa=True)


def write_and_attend(
    step: Step,
    past: int | None,
    with_sdpa: Callable[[UnpackedKV], torch.Tensor],
    with_kernels: Callable[[Call, UnpackedKV], torch.Tensor],
) -> torch.Tensor:
    """Write a long call with kernels, then attend with SDPA.

    SDPA returns NaN for every query after a non-finite key or value. While SDPA runs, the host reads whether the
    kernels found one. If so, `with_kernels` attends again and masks that token.

    Args:
        step: its `past` is not read.
        past: as in `Step`; None if no unpacked keys and values are read.
        with_sdpa: attends over the unpacked keys and values with SDPA.
        with_kernels: the same with kernels.

    Returns:
        The output of one of the two.

    Raises:
        CapacityError: on a CPU, if the tokens do not fit; nothing was written.
    """
    from qattn_kernels.launch.call import make_call
    from qattn_kernels.ops.append.launch import finish
    from qattn_kernels.step.kernels import write_long

    call = make_call(step)
    check_capacity(call.state, call.spec, call.span)
    unpacked = write_long(call, past)
    broken = call.state["nonfinite"].any()
    written = torch.cuda.Event() if broken.is_cuda else None
    broken = broken.to("cpu", non_blocking=True)
    if written is not None:
        written.record()
    out = with_sdpa(unpacked)
    if written is not None:
        written.synchronize()  # the event fires long before the attention ends
    if bool(broken):
        out = with_kernels(call, unpacked)
    finish(call)
    return out
