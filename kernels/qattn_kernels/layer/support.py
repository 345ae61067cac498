"""What the Triton kernels can compute; everything else is the reference's."""

from __future__ import annotations

import importlib.util
import os

import torch

from qattn_kernels.formats import Format
from qattn_kernels.formats.channel_block.reference import ChannelBlockFormat
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.formats.fp8_channel.reference import Fp8ChannelFormat
from qattn_kernels.formats.int8_block.reference import Int8BlockFormat
from qattn_kernels.formats.kivi.reference import KiviFormat
from qattn_kernels.layer.spec import LayerSpec

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCKS = (64, 128)  # and 32 of codes that no product of integers takes in half tiles
MOST_GROUP = 8
FP8_CAPABILITY = (8, 9)
LEAST_GROUP = 32  # channels that a product of integers takes at once
CODED = ("int_group",)  # formats that hold codes of integers, though a prefill makes its own
LISTED = 61  # heads that a recipe's list may name: kernels take it as bits of an integer
PRIORITIES = ("priority", "min_max", "variation")  # `ops.append.ranking` knows them by their index


def no_triton(device_type: str) -> str | None:
    """Why Triton cannot run on devices of this type here, or None. Its interpreter runs on a CPU if the environment
    says `TRITON_INTERPRET=1`."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"Triton kernels need a CUDA GPU, and the model is on {device_type}"


def unsupported(spec: LayerSpec, heads: int, query_heads: int, k_dim: int, v_dim: int) -> str | None:
    """Why the kernels cannot compute a layer of this spec and these sizes, or None."""
    group = query_heads // heads
    if k_dim != v_dim or k_dim not in HEAD_DIMS:
        return f"head dims are {k_dim} and {v_dim}; the kernels know {', '.join(map(str, HEAD_DIMS))}, K and V alike"
    if group > MOST_GROUP:
        return f"{group} query heads share a KV head; the kernels know up to {MOST_GROUP}"
    blocks = BLOCKS if spec.k.integer or spec.v.integer else (32, *BLOCKS)
    if spec.window.block not in blocks:
        return f"blocks have {spec.window.block} tokens; the kernels know {', '.join(map(str, blocks))}"
    if spec.compute.p_scale != "row":
        return f"p_scale is {spec.compute.p_scale!r}; the kernels scale by row"
    pool = spec.sink_pool
    if pool.num and (pool.select, pool.exclude, pool.prefill) != ("smallest_key", True, "group"):
        return "of sink pools the kernels know the one of the smallest keys, excluded, block by block"
    if pool.num and spec.window.span != spec.window.block:
        return "several blocks close together, and the kernels' sink pool competes with one"
    if spec.k.name == "smoothed" and (pool.num or getattr(spec.k.core, "bits", 4) == "mixed"):
        return "keys around a mean beside a sink pool, or with heads ranked by row, are the reference's"
    return _unsupported_formats(spec, k_dim) or _no_fp8(spec)


def _no_fp8(spec: LayerSpec) -> str | None:
    """Of GPUs: FP8 came with compute capability 8.9. The interpreter has it."""
    fp8 = spec.compute.prefill == "int8" and spec.compute.pv == "e4m3"
    if not (fp8 or {"fp8", "fp8_channel"} & {spec.k.core.name, spec.v.core.name}) or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) >= FP8_CAPABILITY:
        return None
    return f"FP8 needs compute capability 8.9, and this GPU has {major}.{minor}: sage2 has pv='model', others int8"


def _unsupported_formats(spec: LayerSpec, dim: int) -> str | None:
    for side, fmt in (("k", spec.k.core), ("v", spec.v.core)):
        if importlib.util.find_spec(f"qattn_kernels.formats.{fmt.name}.jit") is None:
            return f"there are no kernels for {fmt.name} yet"
        reason = _unsupported_product(spec, side, fmt) or _unsupported_format(fmt, side, dim)
        if reason is not None:
            return reason
    if spec.k.windowed != spec.v.windowed:
        return "one of K and V has a ring and the other none"
    return None


def _unsupported_product(spec: LayerSpec, side: str, fmt: Format) -> str | None:
    """Of codes with what a call makes of queries and weights; a prefill makes codes where a format has none."""
    compute = spec.compute
    int8 = "int8" in (compute.prefill, compute.decode)
    coded = fmt.integer or fmt.name in CODED
    if compute.decode == "int8" and not coded and (side == "k" or compute.pv == "int8"):
        return "INT8 products of a decode over keys and values that are no integers are the reference's"
    if int8 and fmt.integer and side == "v" and compute.pv != "int8":
        return "INT8 keys beside INT8 values that are multiplied in the model's precision are the reference's"
    if compute.prefill == "int8" and compute.pv == "e5m2":
        return "pv is 'e5m2'; of FP8 the kernels multiply E4M3"
    if compute.prefill == "int8" and "tensor" in (compute.q_scale, compute.k_scale):
        return "granularity is 'tensor'; the kernels scale queries and keys by token, thread or block"
    if compute.smooth_q != "none" and spec.k.integer:
        return "smooth_q wants keys as they are, and the format has codes alone"
    return None


def _unsupported_format(fmt: Format, side: str, dim: int) -> str | None:
    """Of one format, on its side, for one head dim."""
    if isinstance(fmt, FlashQFormat):
        if fmt.buffer_scale != "token":
            return f"buffer_scale is {fmt.buffer_scale!r}; the kernels scale the buffer by token"
        last = max(fmt.low_heads or (0,))
        if last >= LISTED:
            return f"head {last} is listed; the kernels know lists of the first {LISTED} heads"
        if fmt.bits == "mixed" and fmt.low_heads is None and fmt.priority not in PRIORITIES:
            return f"priority is {fmt.priority!r}; the kernels rank by {', '.join(PRIORITIES)}"
    if isinstance(fmt, KiviFormat) and (fmt.bits == 3 or fmt.per_token != (side == "v")):
        return "of KIVI's formats the kernels know 2 and 4 bits, keys by channel and values by token"
    if isinstance(fmt, ChannelBlockFormat) and fmt.group(dim) < LEAST_GROUP:
        return f"{fmt.group(dim)} channels share a norm at head dim {dim}; the kernels know {LEAST_GROUP} and more"
    if isinstance(fmt, Int8BlockFormat) and fmt.granularity != "block":
        return f"v_granularity is {fmt.granularity!r}; the kernels scale values by block"
    if isinstance(fmt, Fp8ChannelFormat) and fmt.v_scale != "block":
        return f"v_scale is {fmt.v_scale!r}; the kernels scale values by block"
    return None
