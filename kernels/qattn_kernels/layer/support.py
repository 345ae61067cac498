"""Limits of the Triton kernels. The reference computes all other layers."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from qattn_kernels.chip import KIB, LIMIT, chip_here
from qattn_kernels.formats import Format, jit_module
from qattn_kernels.formats.traits import Low, aged_blocks, low_kind, mixes
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import WIDEST_HEAD

HEAD_DIMS = range(64, 513, 8)
BLOCKS = (64, 128)  # and 32, for formats without integer products over half tiles
LEAST_CAPABILITY = (8, 0)  # Triton compiles no INT8 products for earlier GPUs
# Latent attention: channels of the latent and of the RoPE part, and the maximum numbers in a block of latents
LATENT_DIMS = (16, 32, 64, 128, 256, 512)
ROPE_DIMS = (16, 32, 64, 128)
LATENT_BLOCK = 64 * 512
# KiB of shared memory that a program needs in any dtype, with the smallest tiles of `launch/tuned/`: by the largest
# head dimension, and by the channels of a latent
LEAST_SHARED = {128: 64, 256: 99, 512: 163}
LATENT_SHARED = {128: 64, 512: 227}


def no_triton(device_type: str) -> str | None:
    """Return why Triton cannot run on devices of this type, or None.

    Its interpreter runs on a CPU with `TRITON_INTERPRET=1` in the environment."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"Triton kernels need a CUDA GPU, and the model is on {device_type}"


def unsupported(spec: LayerSpec, heads: int, k_dim: int, v_dim: int) -> str | None:
    """Return why the kernels cannot compute a layer with this spec and these sizes, or None."""
    if spec.latent:
        reason = _unsupported_latent(spec, heads, k_dim, v_dim) or _unsupported_sides(spec, k_dim, v_dim)
        return reason or _unsupported_gpu(spec)
    if k_dim != v_dim or k_dim not in HEAD_DIMS:
        return f"head dims are {k_dim} and {v_dim}; the kernels know {head_dims()}"
    no_room = _no_room(f"head dim {k_dim}", k_dim, LEAST_SHARED) or _no_room_for_blocks(spec, k_dim)
    return _reference_only(spec) or _unsupported_sides(spec, k_dim, v_dim) or _unsupported_gpu(spec) or no_room


def head_dims() -> str:
    """Return the head dimensions of kernels in words."""
    return f"multiples of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, the same for K and V"


def reads_pages(spec: LayerSpec, heads: int) -> bool:
    """Return whether kernels can use a page pool for this layer.

    Requires Triton, blocks that close one at a time, and heads with one bit width."""
    one_width = all(low_kind(fmt, heads) <= Low.ALL for fmt in (spec.k, spec.v))
    return spec.impl == "triton" and spec.window.span == spec.window.block and one_width


def _reference_only(spec: LayerSpec) -> str | None:
    """The first setting of a spec that the reference alone computes, or None."""
    pool, aged = spec.sink_pool, [aged_blocks(side) for side in (spec.k, spec.v)]
    known_pool = (pool.select, pool.exclude, pool.prefill) == ("smallest_key", True, "group")
    rules = {
        f"p_scale is {spec.compute.p_scale!r}; the kernels scale by row": spec.compute.p_scale != "row",
        "the kernels know only sink pools of the smallest keys, excluded from their blocks, block by block": (
            pool.num and not known_pool
        ),
        "several blocks close together, and the kernels' sink pool competes with one": (
            pool.num and spec.window.span != spec.window.block
        ),
        "both keys and values have blocks of two widths; the kernels know them on one side": all(aged),
        "only the reference computes sparse V over blocks of two widths": spec.sparsity.tau and any(aged),
        "the kernels know smoothed keys without a sink pool and without heads ranked by row": (
            spec.k.smoothed and (pool.num or mixes(spec.k))
        ),
    }
    return next((why for why, holds in rules.items() if holds), None)


def _no_room(what: str, channels: int, table: dict[int, int]) -> str | None:
    """Return why this GPU has too little shared memory for kernels with `channels` channels, or None.

    The interpreter counts as a Hopper GPU."""
    least, have = next(kib for most, kib in table.items() if channels <= most), chip_here().block // KIB
    if have >= least:
        return None
    limited = f" ({LIMIT} limits it)" if os.environ.get(LIMIT) else ""
    return f"kernels for {what} need {least} KiB of shared memory a block, and this GPU has {have}{limited}"


def _no_room_for_blocks(spec: LayerSpec, dim: int) -> str | None:
    """Return why this GPU has too little memory for the sums of a wide head, or to quantize a block, or None."""
    block = spec.window.block
    if dim > WIDEST_HEAD and chip_here().capability[0] == 10:
        return f"the sums of head dim {dim} exceed the tensor memory of GPUs of compute capability 10"
    if block * dim <= LATENT_BLOCK:
        return None
    return _no_room(f"head dim {dim} and blocks of {block} tokens", block * dim, {2 * LATENT_BLOCK: 227})


def _unsupported_latent(spec: LayerSpec, heads: int, rope: int, latent: int) -> str | None:
    """Return why the kernels of latent attention (MLA) cannot compute a layer with any format, or None."""
    for dim, dims, what in ((latent, LATENT_DIMS, "latents"), (rope, ROPE_DIMS, "RoPE parts")):
        if dim not in dims:
            return f"{what} of latent attention (MLA) have {dim} channels; the kernels know {', '.join(map(str, dims))}"
    if latent * spec.window.block > LATENT_BLOCK:
        return f"blocks have {spec.window.block} tokens, too many for the kernels with {latent} channels of latents"
    if reason := _no_room(f"latents of {latent} channels", latent, LATENT_SHARED):
        return reason
    if spec.sparsity.tau > 0:
        return "only the reference computes sparse V over latent attention (MLA)"
    if any(low_kind(fmt, heads) > Low.ALL for fmt in (spec.k, spec.v)):
        return "latent attention (MLA) has one head, so only the reference computes heads of different bits"
    return None


def _unsupported_gpu(spec: LayerSpec) -> str | None:
    """Return why this GPU has no instructions for a spec, or None. The interpreter counts as a Hopper GPU."""
    chip = chip_here()
    have = ".".join(map(str, chip.capability))
    if chip.capability < LEAST_CAPABILITY:
        return f"kernels need compute capability 8.0, and this GPU has {have}"
    if spec.compute.prefill == "int8" and spec.compute.pv == "e4m3" and not chip.fp8:
        return (
            f"FP8 products need compute capability 8.9, and this GPU has {have}: "
            "use sage2:pv=model, int8 or turboquant, which have kernels here"
        )
    return None


def _unsupported_sides(spec: LayerSpec, k_dim: int, v_dim: int) -> str | None:
    """Return why the kernels cannot take the block size, or the format of K or V, or None."""
    blocks = BLOCKS if spec.k.integer or spec.v.integer else (32, *BLOCKS)
    if spec.window.block not in blocks:
        return f"blocks have {spec.window.block} tokens; the kernels know {', '.join(map(str, blocks))}"
    for side, fmt, dim in (("k", spec.k.core, k_dim), ("v", spec.v.core, v_dim)):
        if not _has_kernels(fmt.name):
            return f"there are no kernels for {fmt.name} yet"
        reason = _unsupported_product(spec, side, fmt) or fmt.kernel_limits(side, dim)
        if reason is not None:
            return reason
    if spec.k.windowed != spec.v.windowed:
        return "one of K and V has a ring and the other none"
    return None


@cache
def _has_kernels(name: str) -> bool:
    """Return whether a format has kernels. Cached, because every layer of every new cache asks."""
    return importlib.util.find_spec(jit_module(name)) is not None


def _unsupported_product(spec: LayerSpec, side: str, fmt: Format) -> str | None:
    """Return why kernels cannot multiply the codes of one side with queries or weights, or None.

    A prefill quantizes sides that the format does not."""
    compute = spec.compute
    int8 = "int8" in (compute.prefill, compute.decode)
    if compute.decode == "int8" and not fmt.coded and (side == "k" or compute.pv == "int8"):
        return "only the reference computes a decode with INT8 products of keys or values that are not integers"
    if int8 and fmt.integer and side == "v" and compute.pv != "int8":
        return "only the reference multiplies INT8 values in the model's dtype with INT8 keys"
    if compute.prefill == "int8" and compute.pv == "e5m2":
        return "pv is 'e5m2'; the kernels multiply only E4M3 in FP8"
    if compute.prefill == "int8" and "tensor" in (compute.q_scale, compute.k_scale):
        return "granularity is 'tensor'; the kernels scale queries and keys by token, thread or block"
    if compute.smooth_q != "none" and spec.k.integer:
        return "smooth_q needs unquantized keys, and the format stores only codes"
    return None
