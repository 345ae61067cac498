"""KIVI: asymmetric 2- to 4-bit codes, of keys by channel over a group of tokens, of values by token over channels.

KIVI (Liu et al.) as the SinkQ and TurboAttention papers describe it. A group of tokens is a block; the newest tokens
and those of an unfinished group stay in the model's precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import FP16_MAX, Block, OpenFormat, Operand, write_rows
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.formats.side import Side
from qattn_kernels.formats.traits import Compensated
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

LARGEST = FP16_MAX
NEAR_LARGEST = LARGEST * (1 - 2**-9)  # of a range that fp16 scale and zero point give back: both are rounded
TILE = 128  # tokens of small blocks that a decode reads at a time
TOGETHER = 8  # channels whose codes compensation finds at once: of more errors are larger, fewer take longer
# A step has so many parts, and a number has so many of which shares of errors are counted. Integers up to 2048 are
# exact in fp16; sums of what is left, and of errors times shares of 512 channels, are below 2^24, so exact in fp32.
STEP_PARTS, LARGEST_LEFT = 64, 1984
SHARE_PARTS, LARGEST_SHARE = 128, 499


def asymmetric(
    low: torch.Tensor, high: torch.Tensor, bits: int, clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 scale and zero point of codes for fp32 values from `low` to `high`: `value = code * scale + zero_point`.

    2 bits from -1 to 5: scale 2 and zero point -1, so that 2.4 is code 2, which is read as 3. With `clip`, the share of
    half a step by which the outer codes lie inside of the range, 1: scale 1.5 and zero point -0.25.
    """
    low, high = low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST)
    steps = torch.full_like(low, 2**bits - 1 + clip)  # by a number, CUDA would multiply by its rounded inverse
    scale = (high - low) / steps
    zero_point = low + scale * (clip / 2) if clip else low
    return scale.half(), zero_point.half()


def encode(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes of fp32 `x` from the scale and zero point as they are stored, in fp16; 0 where the scale is 0."""
    scale, zero_point = scale.float(), zero_point.float()
    code = torch.round((x - zero_point) / torch.where(scale == 0, 1.0, scale))
    return torch.where(scale == 0, 0.0, code).clamp(0, 2**bits - 1).to(torch.uint8)


def encode_compensated(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int, compensation: torch.Tensor
) -> torch.Tensor:
    """uint8 codes of fp32 keys whose errors make up for one another: GPTQ's rounding (Frantar et al., arXiv 2210.17323,
    Algorithm 1) of the channels of a key, `TOGETHER` neighbours at once in place of one after another.

    Each group of channels is rounded after what the errors of all before it make up for is taken off it: as much of
    each as leaves least where queries look. At most a step is passed on: a key outside of the range, such as a sink's,
    would drive its other channels out of it too. Everything is in whole parts of a channel's step, so that sums of
    products are exact in any order of their terms, that of tensor cores too.

    Args:
        x: `[B, H, block, D]`. scale, zero_point: fp16 `[B, H, D]`.
        compensation: fp16 `[H, D, D]`: how much of the error of channel `i` channel `j`, of a group behind, makes up
            for, at `[j, i]`: of GPTQ's Cholesky factor `U` of the inverse second moment of the queries, whose rows and
            columns are groups `I` and `J` here, `inv(U_II) U_IJ`; zeros elsewhere.
    """
    scale = scale.float()
    inverse = (scale != 0) / torch.where(scale == 0, 1.0, scale)
    share = compensation.float() * scale[..., None, :] * inverse[..., None] * SHARE_PARTS
    share = torch.round(share.clamp(-LARGEST_SHARE, LARGEST_SHARE))
    left = (x - zero_point.float()[..., None, :]) * inverse[..., None, :] * STEP_PARTS
    left = torch.round(left.clamp(-LARGEST_LEFT, LARGEST_LEFT))
    code = torch.empty_like(left)
    for at in range(0, x.shape[-1], TOGETHER):
        group = slice(at, at + TOGETHER)
        taken = left[..., :at] @ share[..., group, :at].mT / SHARE_PARTS
        own = left[..., group] - taken
        code[..., group] = torch.round(own / STEP_PARTS).clamp(0, 2**bits - 1)
        error = own - code[..., group] * STEP_PARTS
        left[..., group] = torch.round(error.clamp(-STEP_PARTS, STEP_PARTS))  # in place of what was left
    return code.to(torch.uint8)


@dataclass(frozen=True)
class KiviFormat(Compensated, OpenFormat):
    """Blocks of asymmetric codes behind a ring in the model's precision.

    Attributes:
        bits: 2, 3 or 4.
        clip: of codes of 2 bits, see `asymmetric`.
        per_token: statistics of a token over groups of as many channels as a block has tokens, codes `[D, tokens]`;
            else of a channel over the tokens of a block.
        compensate: of keys by channel: errors of a key's channels make up for one another (`encode_compensated`).
    """

    bits: int = 2
    clip: float = 0.0
    per_token: bool = False
    compensate: bool = False

    name = "kivi"
    integer = False

    def kernel_limits(self, side: str, dim: int) -> str | None:
        if self.per_token != (side == "v"):
            return "of KIVI's formats the kernels know keys by channel and values by token"
        return None

    def kernel_bits(self, heads: int) -> int:
        return self.bits

    @property
    def inside(self) -> float:
        """`clip` as far as codes of these bits have one."""
        return self.clip if self.bits == 2 else 0.0

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        plain, tile = super().side(heads, dim, block, values), self.tile(dim, block)
        plain = plain._replace(CLIP=int(16 * self.inside), COMPENSATES=self.compensate)
        return plain._replace(MOST_TILE=tile, STRIDED=self.strided(dim, block))

    def tile(self, dim: int, block: int) -> int:
        """How many blocks a decode may read at a time; packed codes of values are `strided` where these are several."""
        return TILE // block if self.bits != 3 and dim in (64, 128) and block < dim else 1

    def strided(self, dim: int, block: int) -> bool:
        """Whether every eighth token of a block stands side by side in packed codes, of values in groups smaller than a
        head: of 32 tokens 0, 8, 16, 24, 1, 9, ... A thread of a tensor core has these of a tile of scores, and packs
        weights of four tokens in a word as the next product wants them."""
        return self.per_token and self.tile(dim, block) > 1

    def decode_warps(self, dim: int, block: int, columns: int) -> int:
        if self.per_token and dim > max(block, 128):  # of more groups than one a token, which are dequantized
            return 4
        return super().decode_warps(dim, block, columns)

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        b, h, n, tokens = geo.batch, geo.heads, geo.blocks, window.block * self.bits // 8
        codes = (dim, tokens) if self.per_token else (tokens, dim)
        scales = (-(-dim // window.block), window.block) if self.per_token else (dim,)
        tensors = {
            "codes": TensorSpec((b, h, n, *codes), torch.uint8, 0, 2),
            "scale": TensorSpec((b, h, n, *scales), torch.float16, 0, 2),
            "zero_point": TensorSpec((b, h, n, *scales), torch.float16, 0, 2),
        }
        if self.compensate:
            tensors["compensation"] = TensorSpec((h, dim, dim), torch.float16, batch_dim=None)
        return tensors

    def write(self, state: State, block: Block) -> None:
        x = block.tokens.x.float()
        scale, zero_point = self._by_token(x) if self.per_token else self._by_channel(x, block.keep)
        if self.compensate:
            code = encode_compensated(x, scale, zero_point, self.bits, state["compensation"])
        else:
            code = encode(x, *self._spread(scale, zero_point, x.shape[-1]), self.bits)
        if self.strided(x.shape[-1], x.shape[-2]):
            code = code.unflatten(-2, (-1, 4, 8)).transpose(-3, -2).flatten(-4, -2)
        code = pack(code, self.bits)
        code = code.transpose(-1, -2) if self.per_token else code
        for name, values in (("codes", code), ("scale", scale), ("zero_point", zero_point)):
            write_rows(state[name], block.index, block.write, values)

    def _by_channel(self, x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, H, D]` of `x` `[B, H, block, D]`: masked tokens do not widen a range, and none at all have none."""
        some = keep.any(-1)[..., None]
        low = torch.where(keep[..., None], x, torch.inf).amin(-2)
        high = torch.where(keep[..., None], x, -torch.inf).amax(-2)
        low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
        return asymmetric(low, high, self.bits, self.inside)

    def _by_token(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, H, groups, block]`: of each token over groups of channels, the last of which may be a short one."""
        group, dim = x.shape[-2:]
        channels = torch.arange(dim + -dim % group, device=x.device).clamp(max=dim - 1)
        whole = x[..., channels].unflatten(-1, (-1, group))
        low, high = whole.aminmax(dim=-1)
        return asymmetric(low.transpose(-1, -2), high.transpose(-1, -2), self.bits, self.inside)

    def _spread(self, scale: torch.Tensor, zero_point: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of every value: `[..., block, D]`, or what broadcasts to that."""

        def spread(scale: torch.Tensor) -> torch.Tensor:
            if not self.per_token:
                return scale[..., None, :]
            return scale.transpose(-1, -2).repeat_interleave(scale.shape[-1], -1)[..., :dim]

        return spread(scale), spread(zero_point)

    def read(self, state: State, blocks: int) -> Operand:
        return Operand(self.numbers(state, blocks).to(state["ring"].dtype), None)

    def numbers(self, state: State, blocks: int) -> torch.Tensor:
        """The first `blocks` blocks `[B, Hkv, blocks, block, D]` dequantized, in fp32."""
        codes = state["codes"][:, :, :blocks]
        code = unpack(codes.transpose(-1, -2) if self.per_token else codes, self.bits).float()
        if self.strided(code.shape[-1], code.shape[-2]):
            code = code.unflatten(-2, (-1, 8, 4)).transpose(-3, -2).flatten(-4, -2)
        scale, zero_point = (state[name][:, :, :blocks].float() for name in ("scale", "zero_point"))
        scale, zero_point = self._spread(scale, zero_point, code.shape[-1])
        return code * scale + zero_point

    def clamped_scales(self, state: State) -> torch.Tensor:
        """Ranges of which one end is FP16's largest number, as far as scale and zero point tell."""
        scale, zero_point = state["scale"].float(), state["zero_point"].float()
        low = zero_point - scale * (self.inside / 2)
        high = low + scale * (2**self.bits - 1 + self.inside)
        return (torch.maximum(-low, high) >= NEAR_LARGEST).flatten(3).sum(-1)

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        return [[self.bits] * heads for _ in range(state["codes"].shape[0])]


FORMAT = KiviFormat
