"""KIVI: asymmetric 2- to 4-bit codes. Keys are quantized per channel over a group of tokens, values per token.

KIVI (Liu et al.) as the SinkQ and TurboAttention papers describe it. A group of tokens is a block. The newest tokens,
and those of an unfinished group, stay unquantized (bf16/fp16/fp32)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import FP16_MAX, Block, OpenFormat, Operand, write_rows
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.formats.side import Side
from qattn_kernels.formats.traits import Compensated
from qattn_kernels.layout import WIDEST_HEAD, Geometry, State, TensorSpec, Window

LARGEST = FP16_MAX
NEAR_LARGEST = LARGEST * (1 - 2**-9)  # end of a range restored from fp16 scale and zero point, which are both rounded
TILE = 128  # tokens that a decode reads at a time from small blocks
TOGETHER = 8  # channels that compensation rounds at once: larger groups err more, smaller ones take longer
# Fixed-point parts of a step, and of a share of an error. Integers up to 2048 are exact in fp16. Sums of remainders,
# and of errors times shares over 512 channels, stay below 2^24, so they are exact in fp32.
STEP_PARTS, LARGEST_LEFT = 64, 1984
SHARE_PARTS, LARGEST_SHARE = 128, 499


def asymmetric(
    low: torch.Tensor, high: torch.Tensor, bits: int, clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp16 scale and zero point for fp32 values from `low` to `high`: `value = code * scale + zero_point`.

    Example, 2 bits from -1 to 5: scale 2 and zero point -1, so 2.4 becomes code 2, which is read as 3. `clip` moves the
    outermost codes inward by `clip / 2` of a step; with `clip` 1, scale 1.5 and zero point -0.25."""
    low, high = low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST)
    steps = torch.full_like(low, 2**bits - 1 + clip)  # a tensor: CUDA divides by a number via its rounded inverse
    scale = (high - low) / steps
    zero_point = low + scale * (clip / 2) if clip else low
    return scale.half(), zero_point.half()


def encode(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 codes of fp32 `x` for fp16 scale and zero point as stored; 0 where the scale is 0."""
    scale, zero_point = scale.float(), zero_point.float()
    code = torch.round((x - zero_point) / torch.where(scale == 0, 1.0, scale))
    return torch.where(scale == 0, 0.0, code).clamp(0, 2**bits - 1).to(torch.uint8)


def encode_compensated(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int, compensation: torch.Tensor
) -> torch.Tensor:
    """Return uint8 codes of fp32 keys whose channel errors offset each other: GPTQ's rounding.

    GPTQ (Frantar et al., arXiv 2210.17323, Algorithm 1) rounds the channels of a key one after another; this code
    rounds `TOGETHER` neighbours at once. Before a group of channels is rounded, shares of the errors of all earlier
    channels are subtracted. The shares minimize the error along the queries.

    A channel passes on at most one step of error. Otherwise a key outside the range, such as a sink's, would push its
    other channels out of range too. All terms are whole parts of a channel's step, so sums are exact in any order,
    including the order of tensor cores.

    Args:
        x: `[B, H, block, D]`.
        scale, zero_point: fp16 `[B, H, D]`.
        bits: bits per code.
        compensation: fp16 `[H, D, D]`. Entry `[j, i]` is the share of channel `i`'s error that channel `j` of a later
            group takes. It is `inv(U_II) U_IJ` for groups `I` and `J`, with GPTQ's Cholesky factor `U` of the inverse
            second moment of the queries; zeros elsewhere.
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
        left[..., group] = torch.round(error.clamp(-STEP_PARTS, STEP_PARTS))  # errors replace the remainders
    return code.to(torch.uint8)


@dataclass(frozen=True)
class KiviFormat(Compensated, OpenFormat):
    """Blocks of asymmetric codes, with an unquantized ring (bf16/fp16/fp32).

    Attributes:
        bits: 2, 3 or 4.
        clip: shrinks the 2-bit range, see `asymmetric`.
        per_token: ranges per token, over groups with as many channels as a block has tokens; codes `[D, tokens]`.
            Otherwise ranges per channel over the tokens of a block.
        compensate: for keys per channel, errors of a key's channels offset each other (`encode_compensated`).
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
        """`clip` if these bits support it, else 0."""
        return self.clip if self.bits == 2 else 0.0

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        plain, tile = super().side(heads, dim, block, values), self.tile(dim, block)
        plain = plain._replace(CLIP=int(16 * self.inside), COMPENSATES=self.compensate)
        return plain._replace(MOST_TILE=tile, STRIDED=self.strided(dim, block))

    def tile(self, dim: int, block: int) -> int:
        """Return the maximum blocks that a decode reads at a time. Above one, packed codes of values are `strided`."""
        return TILE // block if self.bits != 3 and dim in (64, 128) and block < dim else 1

    def strided(self, dim: int, block: int) -> bool:
        """Return whether packed codes of values place every eighth token side by side.

        For 32 tokens the order is 0, 8, 16, 24, 1, 9, ... Used for groups smaller than a head. A tensor core thread
        holds these tokens in a tile of scores. It packs the weights of four tokens into a word for the next product."""
        return self.per_token and self.tile(dim, block) > 1

    def decode_warps(self, dim: int, block: int, columns: int) -> int:
        if self.per_token and dim > max(block, 128):  # several groups per token, which are dequantized
            return 4 if dim <= WIDEST_HEAD else 8
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
        """Return scale and zero point `[B, H, D]` of `x` `[B, H, block, D]`.

        Masked tokens do not widen a range; without any token the range is zero."""
        some = keep.any(-1)[..., None]
        low = torch.where(keep[..., None], x, torch.inf).amin(-2)
        high = torch.where(keep[..., None], x, -torch.inf).amax(-2)
        low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
        return asymmetric(low, high, self.bits, self.inside)

    def _by_token(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point `[B, H, groups, block]` of each token over groups of channels. The last group may
        be short."""
        group, dim = x.shape[-2:]
        channels = torch.arange(dim + -dim % group, device=x.device).clamp(max=dim - 1)
        whole = x[..., channels].unflatten(-1, (-1, group))
        low, high = whole.aminmax(dim=-1)
        return asymmetric(low.transpose(-1, -2), high.transpose(-1, -2), self.bits, self.inside)

    def _spread(self, scale: torch.Tensor, zero_point: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point of every value, in a shape that broadcasts to `[..., block, D]`."""

        def spread(scale: torch.Tensor) -> torch.Tensor:
            if not self.per_token:
                return scale[..., None, :]
            return scale.transpose(-1, -2).repeat_interleave(scale.shape[-1], -1)[..., :dim]

        return spread(scale), spread(zero_point)

    def read(self, state: State, blocks: int) -> Operand:
        return Operand(self.numbers(state, blocks).to(state["ring"].dtype), None)

    def numbers(self, state: State, blocks: int) -> torch.Tensor:
        """Return the first `blocks` blocks `[B, Hkv, blocks, block, D]` dequantized, in fp32."""
        codes = state["codes"][:, :, :blocks]
        x = unpack(codes.mT.contiguous() if self.per_token else codes, self.bits).float()
        if self.strided(x.shape[-1], x.shape[-2]):
            x = x.unflatten(-2, (-1, 8, 4)).transpose(-3, -2).flatten(-4, -2)
        scale, zero_point = (state[name][:, :, :blocks].float() for name in ("scale", "zero_point"))
        if self.per_token and x.shape[-1] % x.shape[-2] == 0:  # whole groups of channels
            groups = x.unflatten(-1, (-1, x.shape[-2]))
            groups.mul_(scale.mT.contiguous()[..., None]).add_(zero_point.mT.contiguous()[..., None])
            return x
        scale, zero_point = self._spread(scale, zero_point, x.shape[-1])
        return x.mul_(scale).add_(zero_point)

    def clamped_scales(self, state: State) -> torch.Tensor:
        """Return the count of ranges with an end at the largest fp16 number, judged by scale and zero point."""
        scale, zero_point = state["scale"].float(), state["zero_point"].float()
        low = zero_point - scale * (self.inside / 2)
        high = low + scale * (2**self.bits - 1 + self.inside)
        return (torch.maximum(-low, high) >= NEAR_LARGEST).flatten(3).sum(-1)
