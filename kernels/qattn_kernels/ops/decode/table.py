"""Choose the launch configuration of a decode from the sizes of a call.

It must not depend on the capacity: the number of splits changes the order of sums, and results would change when a
cache grows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from qattn_kernels.chip import Chip
from qattn_kernels.formats.contract import jit_of
from qattn_kernels.formats.head_bits import unspecialized
from qattn_kernels.launch.constants import UNIT, WHOLE, Sizes
from qattn_kernels.launch.tuned import Decode, tuned_for
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry

REGISTERS = 65536  # per multiprocessor, on Volta and later GPUs
OWN_REGISTERS = 256  # per thread, what most kernels compile to
MODEL_REGISTERS = 168  # per thread, if values are unquantized
MOST_REGISTERS = 255  # hardware limit per thread
# Channels that one warp holds. Two warps wait for each other several times per block. On an H100 with 16 columns and
# 32k tokens that took up to twice as long, because unpacking is most of the work.
ONE_WARP_DIM = 128
# Share of shared memory for tiles in flight. On an H200 with 16 rows, three loads took longer than two: 5 % at 12 KiB,
# up to 10 % at 16 to 32 KiB. With one row they were 2 % faster.
MOST_SHARED = 0.75
# Programs of a head that run at once, from which a program may read a single block. One row of 512 to 4,096 tokens: up
# to 15 % faster on an H200. A ring takes longer than a block anyway.
CROWDED = 16
# Programs of a head that run at once, up to which one program reads the ring and then the sinks. Then 64 rows of 512
# tokens take two whole waves in place of two and a half: 5 % faster on an H200.
TOGETHER = 2
# Tokens up to which one program reads a whole row, where two would, if it can store the output. On an H200 64 rows of
# `int8` take 10 % less time with 512 tokens, and 2 % less with 2,000.
ALONE = 2048
# Parts of a long context that its large splits read, out of `WHOLE`. Open tokens and half as many small splits start
# when the first programs end: programs of one size would leave the memory idle while the last ones run. On an H200 16
# rows of 32,768 tokens take 5 % less time than with twice as many equal splits (`turbo`), KIVI with 2 bits 9 %. With
# 15/16, 64 rows of 4,096 tokens took 3 % more.
LARGE = WHOLE * 63 // 64
OWN_SHARED = 2048  # typical bytes per program in addition to its tiles
MOST_OWN_SHARED = 16 * 1024  # upper limit of those bytes: exchange between threads, and the queries


class Shares(NamedTuple):
    """How splits share the packed blocks of a context.

    Attributes:
        few: splits of a short context.
        many: splits of a long context. With many rows they are fewer.
        long: a context is long if each of `few` splits would get this number of blocks or more.
        least: least blocks per split. A shorter context leaves splits unused.
        open: splits numbered before these, which read open tokens and sinks. If `Sizes.OPEN` is larger, one split reads
            the ring and then the sinks.
        large: how many of the `many` splits of a long context, the first ones, are larger than the others; 0 if all are
            equal.
        part: blocks of each large split, in units of 1 / `WHOLE` of the context.
    """

    few: Any
    many: Any
    long: Any
    least: Any
    open: Any
    large: Any = 0
    part: Any = 0


def encoded(shares: Shares) -> tuple[int, ...]:
    """Return shares as `splits.read_rule` takes them: no number of them selects another compiled kernel."""
    few, many, long, least, open, large, part = shares
    rule = few * long, part, large, _reciprocal(few), _reciprocal(many - large), least, open
    return tuple(unspecialized(n) for n in rule)


def _reciprocal(n: int) -> int:
    """Return `UNIT / n`, rounded up."""
    return -(-UNIT // n)


class Launch(NamedTuple):
    """Launch configuration of a decode.

    Attributes:
        shares: how splits share a context.
        warps: warps per program.
        stages: loads in flight per program.
        registers: limit per thread, or None for the compiler's choice.
        alone: loads in flight per program that reads a whole row and stores the output.
    """

    shares: Shares
    warps: int
    stages: int
    registers: int | None
    alone: int


@lru_cache(maxsize=1024)
def choose(size: Sizes, spec: LayerSpec, dtype: torch.dtype, rows: int, chip: Chip) -> Launch:
    """Choose the launch configuration of a decode.

    Args:
        size: constants of the call.
        spec: formats of the layer.
        dtype: dtype of the model, which an unquantized ring or unquantized values have.
        rows: tiles of queries per KV head, over all rows of the batch.
        chip: the GPU.
    """
    warps, stages = 1, 3
    if spec.v.in_model_precision:
        warps, stages = 2, 2
    elif size.K.DP > ONE_WARP_DIM:
        # four warps would select Hopper's wgmma, whose 8-bit form needs an order of weights that Triton 3.6 does not
        # provide
        warps = 2
    warps = max(warps, *(fmt.core.decode_warps(size.K.D, size.BLOCK, size.N) for fmt in (spec.k, spec.v)))
    registers = 32 * warps * (MODEL_REGISTERS if spec.v.in_model_precision else OWN_REGISTERS)
    programs = REGISTERS // registers  # per multiprocessor, limited by registers
    tile = _tile_bytes(size, spec, dtype)
    if warps > 2 or 3 in (size.K.BITS, size.V.BITS):
        stages = 2  # with three stages, shared memory holds half as many programs
    elif 2 * tile * programs > MOST_SHARED * chip.shared:
        stages = 2  # independent of rows, to avoid compiling another kernel for some of them
    if (stages - 1) * tile + MOST_OWN_SHARED > chip.block:
        stages = max(1, 1 + (chip.block - MOST_OWN_SHARED) // tile)
    programs = max(1, min(programs, chip.shared // ((stages - 1) * tile + OWN_SHARED)))
    # without the limit the compiler may choose 168 registers: 5 % slower at 32k on an H200 than the 226 chosen with it
    most = MOST_REGISTERS if spec.k.asks_registers(size.H) and spec.v.asks_registers(size.H) else None
    tuned = tuned_for(chip).decode
    shares = shares_of(
        chip.multiprocessors * programs, rows * size.H, size.BLOCK, size.RING_PARTS, size.OPEN > size.RING_PARTS, tuned
    )
    alone = stages
    if shares.few <= TOGETHER and ends_alone(size, spec):
        shares = shares._replace(few=1, long=ALONE // size.BLOCK)
        # few programs leave shared memory for three loads: 64 rows of 512 tokens take 2 % less on an H200 (`int8`)
        if rows * size.H <= chip.multiprocessors * (chip.shared // (2 * tile + OWN_SHARED)):
            alone = max(stages, 3)
    return Launch(shares, warps, stages, most, alone)


def ends_alone(size: Sizes, spec: LayerSpec) -> bool:
    """Return whether a program that reads a whole row can store the output of a layer without learned sinks.

    A merge has more to do where open tokens or sinks have a program, values are rotated, or sparse V counts.
    Unquantized values were not measured. The program computes what the merge of one split does, so that outputs do
    not depend on the capacity."""
    merges = size.OPEN or size.SPARSE_V or size.V.ROTATION is not None
    return not merges and not spec.v.in_model_precision


def takes_token(size: Sizes, spec: LayerSpec) -> bool:
    """Return whether a decode of several splits can write the call's token.

    Formats without a ring store the token in the last block, which one split reads. Nothing may have to be packed or
    rotated first, and formats must quantize alike with fused multiply-adds (`JitFormat.fuses`)."""
    rotates = size.K.ROTATION is not None or size.V.ROTATION is not None
    plain = size.ONE_TOKEN and size.RING == 0 and size.SPAN == size.BLOCK and not (rotates or size.K.SMOOTH)
    return plain and all(jit_of(fmt).fuses for fmt in (spec.k, spec.v))


def shares_of(places: int, heads: int, block: int, ring: int, pool: bool, tuned: Decode) -> Shares:
    """Return how many programs share the context.

    Fills whole waves, because a nearly empty last wave takes as long as a full one. One wave is the rule, or the fewest
    waves that use most places. A long context gets small programs after that, see `LARGE`, or twice as many if they are
    small anyway, so that none holds up the others. Few rows and heads get only as many programs as their merge is
    worth, in one wave with the programs of open tokens.

    Args:
        places: programs that run at once.
        heads: tiles of queries over all rows and KV heads, each with a context to share.
        block: tokens per block.
        ring: parts of the ring, each read by a program.
        pool: whether a program reads sinks.
        tuned: measured limits of the GPU.
    """
    waves = next((w for w in range(1, 4) if w * places // heads * heads >= tuned.whole * w * places), 3)
    each, open = max(1, waves * places // heads), ring + pool
    least = 1 if each > CROWDED and ring != 1 else tuned.least
    if each > tuned.most:
        many = max(tuned.most, min(tuned.most_long, each - open))
        return Shares(tuned.most, many, tuned.long // 2 // block, least, open)
    if ring > 1:  # a row rarely uses all parts, so they get no places
        shares = Shares(each, 2 * each, tuned.long // block, least, open)
    elif each <= TOGETHER and open:
        shares = Shares(max(1, 2 * each - 1), each, tuned.long // 4 // block, least, 1)
    else:
        shares = Shares(each - open, 2 * each - open, tuned.long // block, least, open)
    if each > CROWDED:
        return shares
    many = each + max(2, each // 2)
    long = max(shares.long, -(-many // shares.few))  # a long context has a block for every split
    return shares._replace(many=many, long=long, large=each, part=LARGE // each)


def _tile_bytes(size: Sizes, spec: LayerSpec, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values that a program reads per iteration. Each load in flight needs as much
    memory."""
    tensors = layer_tensors(Geometry(1, size.H, size.K.D, size.V.D, 1, dtype), spec).items()
    blocks = sum(x.nbytes() for name, x in tensors if name[:2] in ("k.", "v.") and x.block_dim is not None)
    return blocks // size.H * size.TILE
