"""Launch the append kernels. For long calls, also rank heads, unpack keys and values, and fill the ring."""

from __future__ import annotations

import torch

from qattn_kernels.formats.contract import JitFormat, jit_of
from qattn_kernels.formats.traits import Low
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.constants import FACTORS_STEP, WIDEST_TILE, Sizes, power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import codes, dependent
from qattn_kernels.launch.unpacked_kv import UnpackedKV, tensors
from qattn_kernels.layout import WIDEST_HEAD
from qattn_kernels.ops.append.k_mean import mean_kernel
from qattn_kernels.ops.append.kernel import short_kernel
from qattn_kernels.ops.append.long_call import finish_kernel, long_kernel
from qattn_kernels.ops.append.past import unpack_past_kernel
from qattn_kernels.ops.append.ranking import priorities_kernel, rank_kernel
from qattn_kernels.reference.rows import open_span_blocks

FEW_PROGRAMS = 128  # up to this many programs, split keys from values: more multiprocessors are busy
AT_ONCE = 512  # programs that run on a GPU at the same time
TWO_EACH = 264  # programs of four warps, two on each of the 132 multiprocessors of an H200 or H100


def _codec(jit: JitFormat, reads: bool = False) -> tuple:
    """Return a `kernel.Codec` as a plain tuple. Pass `reads=True` only for kernels that read blocks back."""
    return jit.quantize_tokens, jit.block_form, jit.place, jit.put, jit.close, jit.get if reads else None


def rank(call: Call) -> None:
    """Decide which heads get 2 bits, in rows whose first block a long call closes. Runs before the append.

    Does nothing for formats that do not rank heads. Short calls rank heads inside the append."""
    size = call.sizes
    if max(size.K.RANK, size.V.RANK) < 0:
        return
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    priorities = torch.empty((call.batch, 2, size.H), dtype=torch.float64, device=call.key.device)
    launch(
        priorities_kernel, (size.H, call.batch),
        call.source, *call.spans, call.layer, priorities, call.blocks, k.quantize_tokens, k.block_form,
        v.quantize_tokens, v.block_form, size, **codes(size),
    )  # fmt: skip
    launch(
        rank_kernel, (call.batch,),
        *call.spans, call.layer, priorities, call.blocks, size, **codes(size),
    )  # fmt: skip


def call_mean(call: Call) -> None:
    """Compute the mean that a long call subtracts from smoothed keys. Runs before the call; does nothing without
    smoothing."""
    if call.sizes.K.SMOOTH:
        launch(
            mean_kernel, (call.sizes.H, call.batch),
            call.source, *call.spans, call.layer, call.call_mean, call.blocks, jit_of(call.spec.k).quantize_tokens,
            call.sizes, **codes(call.sizes),
        )  # fmt: skip


def append(call: Call) -> None:
    """Write the tokens of a short call and pack full blocks.

    Also chooses sinks, and the heads that get 2 bits. The kernels that follow commit the row lengths."""
    k, v, state = jit_of(call.spec.k), jit_of(call.spec.v), call.state
    rotates, blocks = call.sizes.K.ROTATION is not None, _blocks(call)
    options, rows = _short_codes(call.sizes), call.sizes.H * call.batch
    parts = 2 if "maxnreg" in options or blocks * rows <= FEW_PROGRAMS else 1
    # one more program per head and row rotates the queries, unless it would wait for a free multiprocessor
    apart = rotates and (parts * blocks + 1) * rows <= AT_ONCE
    crowded = (parts * blocks + apart) * rows > TWO_EACH * 4 // options["num_warps"]
    if crowded and max(call.sizes.K.DP, call.sizes.V.DP) <= 128 and not call.sizes.K.SMOOTH:
        # Programs that only append would otherwise reserve the registers needed to close a block. Smoothed keys would
        # gain little and need one more compiled kernel before the first call.
        options.setdefault("maxnreg", 128)
    # When a row's open tokens fill several blocks, most programs have no new token and would only wait for this load.
    early = call.tokens == 1 and (blocks == 1 or parts * blocks * rows <= AT_ONCE)
    queries: tuple | None = None
    if rotates:
        strides = call.query.stride()[:3], call.turned.stride()[:3]
        queries = (call.query, call.turned, *strides, state["k.equalizer"][1] if call.sizes.K.EQUALIZED else None)
    launch(
        short_kernel, (call.sizes.H, call.batch, parts * blocks + apart),
        call.source, *call.spans, call.layer, call.rows, call.blocks, queries, call.tokens, parts, _codec(k), _codec(v),
        power_of_two(call.tokens), early, call.sizes, **options, **dependent(call.sizes),
    )  # fmt: skip


def _blocks(call: Call) -> int:
    """Return the blocks of the open span that have programs in a short call.

    One new token is in one block. If single blocks are packed, its program also packs the row's first open block: a
    program for each block of KIVI's span would end at once in most steps."""
    if call.sizes.ONE_TOKEN and call.sizes.SPAN == call.sizes.BLOCK:
        return 1
    return open_span_blocks(call.spec.window, call.tokens)


def _short_codes(size: Sizes) -> dict[str, int]:
    """Return launch options of `short_kernel`.

    Most calls close no block and need few registers. Closing a block of 128 tokens needs enough registers to fill a
    multiprocessor with one program, which prevents overlap between the two parts. Ranking heads holds one more block in
    registers, so it gets twice the threads."""
    ranks = max(size.K.RANK, size.V.RANK) >= 0
    options = codes(size, 64 * 64 if ranks else 64 * 128)
    return {**options, "maxnreg": 64} if size.BLOCK == 128 and options["num_warps"] == 8 else options


def append_long(call: Call, unpacked: UnpackedKV) -> None:
    """Write the tokens of a long call and pack full blocks.

    Open and new tokens also go to the unpacked keys and values, if `unpacked` has slots. `finish` fills the ring later.
    """
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    blocks = open_span_blocks(call.spec.window, call.tokens) + WIDEST_TILE // call.sizes.BLOCK
    (parts, options), chosen = _long_codes(call), call.sinks.chosen
    launch(
        long_kernel, (parts * blocks, call.sizes.H, call.batch),
        call.source, *call.spans, call.layer, call.call_mean, tensors(unpacked), call.rows, call.blocks,
        0 if chosen is None else chosen.shape[2], _codec(k, True), _codec(v, True), parts, call.sizes, **options,
    )  # fmt: skip


def _long_codes(call: Call) -> tuple[int, dict[str, int]]:
    """Return parts per block and launch options of `long_kernel`.

    Heads wider than 256 channels take two parts. 128 channels of both sides do not fit in registers at once. The call
    then uses two parts, or twice as many threads:

    - Groups of 128 unquantized tokens take more threads. With compensation they take two parts, because a tile passes
      through shared memory.
    - Blocks requantized from token codes take two parts, except at 2 bits, whose values pass between warps.
    - Plain copies are limited by memory latency, so two parts keep more loads in flight."""
    size, spec, options = call.sizes, call.spec, codes(call.sizes, 64 * 64)
    if max(size.K.DP, size.V.DP) == 128:
        if size.BLOCK == 128 and not spec.k.integer:
            return (2, {**options, "maxnreg": 128}) if size.K.COMPENSATES else (1, {**options, "num_warps": 16})
        if size.BLOCK == 64 and spec.k.block_scales and spec.v.block_scales and size.K.LOW == size.V.LOW == Low.NONE:
            return 2, {**options, "maxnreg": 80}
        if size.BLOCK == 64 and spec.k.in_model_precision and spec.v.in_model_precision:
            return 2, {**options, "maxnreg": 64}
    if min(size.K.DP, size.V.DP) > WIDEST_HEAD:
        return 2, {**options, "maxnreg": 128}
    return 1, {**options, "maxnreg": 128}  # two programs of eight warps share a multiprocessor


def empty_unpacked(call: Call, past: int | None) -> UnpackedKV:
    """Allocate unpacked keys and values for `past` blocks plus the call's open span, uninitialised.

    `past=None` allocates zero slots, for calls that never read them. Quantized values stay INT8 if the call multiplies
    INT8 codes or the attention is latent."""
    size, spec, slots = call.sizes, call.spec, 0
    if past is not None:
        slots = (min(past, call.blocks) + open_span_blocks(spec.window, call.tokens)) * size.BLOCK + WIDEST_TILE
    shape = (call.batch, size.H, slots)

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=call.key.device)

    def side(integer: bool, dim: int, transposed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not integer:
            return empty((*shape, dim), call.key.dtype), None
        return empty((*shape[:2], dim, slots) if transposed else (*shape, dim), torch.int8), empty(shape)

    codes = spec.compute.prefill == "int8" or spec.latent
    k, v = side(codes and spec.k.integer, size.K.D, False), side(codes and spec.v.integer, size.V.D, True)
    pos = empty((call.batch, slots), torch.int32)
    k_mean = call.call_mean if size.K.SMOOTH and k[1] is not None else None
    return UnpackedKV(*k, *v, bias=empty(shape), pos=pos, rows=call.rows, k_mean=k_mean)


def unpack_past(call: Call, unpacked: UnpackedKV, past: int) -> None:
    """Unpack the blocks that were closed before the call, at most `past` blocks per row, into the unpacked keys and
    values."""
    if past == 0:
        return
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    launch(
        unpack_past_kernel, (min(past, call.blocks), call.sizes.H, call.batch),
        call.layer, tensors(unpacked), call.blocks, k.locate, v.locate, k.get, v.get, call.sizes,
        **codes(call.sizes),
    )  # fmt: skip


def finish(call: Call, unpacked: UnpackedKV | None = None) -> None:
    """Finish a long call: write the newest tokens to the ring and commit the row lengths.

    Also computes the value factors (`ops.prefill.value_factors`) of `unpacked`, if it has room for them."""
    k, v, size = jit_of(call.spec.k), jit_of(call.spec.v), call.sizes
    factors, slots = (None, 0) if unpacked is None else (unpacked.factors, unpacked.bias.shape[2])
    tiles, heads = -(-size.RING // size.BLOCK), size.H if size.RING or factors else 1
    launch(
        finish_kernel, (max(1, tiles), heads, call.batch),
        call.source, call.rows, call.layer, factors, call.blocks, call.batch, call.tokens, slots,
        k.quantize_tokens, v.quantize_tokens, FACTORS_STEP, size, **codes(call.sizes),
    )  # fmt: skip
