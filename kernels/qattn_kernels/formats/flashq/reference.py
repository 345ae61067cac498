"""FlashQ, TurboAttention's progressive quantization: INT8 per token first, then 4 or 2 bits per channel of a block.

TurboAttention section 3, Eq. 3, 4 and 7, Algorithms 1 and 2. The paper has variants that differ. This code uses the
rounded scale with a centred zero point, whose dequantized values always fit INT8.

Blocks can also stay in the first stage (8 bits) and get the second stage later (`ops.repack`). A fixed-size cache uses
this to repack its oldest blocks. Repacking from 8 bits gives the same codes as packing to 4 bits at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qattn_kernels.formats.base import (
    INT8_LEVELS,
    Arrival,
    Block,
    FixedBy,
    Format,
    Operand,
    int8_ring,
    int8_tokens,
    write_rows,
)
from qattn_kernels.formats.flashq.priority import head_priority
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.formats.side import Side
from qattn_kernels.formats.traits import AgedBlocks, Low, MixedHeads, Span, pieces
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


def stage_one(tokens: Operand, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the first stage: INT8 codes with one scale per token become `X1` with one scale per block.

    Tokens are `[..., block, D]`. `s = max s_t` and `X1 = round(code * s_t / s)`, without dequantizing in between.
    Tokens outside `keep` `[..., block]` do not raise the scale; larger numbers are clamped."""
    scale = (tokens.scales if keep is None else torch.where(keep, tokens.scales, 0.0)).amax(-1)
    divisor = torch.where(scale == 0, 1.0, scale)
    x1 = torch.round(tokens.x.float() * (tokens.scales / divisor[..., None])[..., None])
    return x1.clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8), scale


def stage_two(
    x1: torch.Tensor, keep: torch.Tensor, bits: int, clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply the second stage: asymmetric `bits`-bit codes of `X1` `[..., block, D]`, in integer arithmetic.

    Returns `code`, and INT8 `channel_scale` and `zero_point` per channel. `X1` is dequantized as
    `code * channel_scale + zero_point`. Example, 4 bits: a channel from -20 to 40 has `channel_scale = 4` and
    `zero_point = -20`. Its 17 becomes code 9, which is read as 16. Tokens outside `keep` `[..., block]` do not widen
    the range; without any token the range is zero. With 8 bits the code is `X1` itself, INT8. `clip` moves the
    outermost 2-bit codes inward by `clip / 2` of a step (a multiple of 1/16)."""
    if bits == 8:
        unit = x1.new_ones((*x1.shape[:-2], x1.shape[-1]))
        return x1, unit, torch.zeros_like(unit)
    x1, levels = x1.int(), 2**bits - 1
    low = torch.where(keep[..., None], x1, 127).amin(-2)
    high = torch.where(keep[..., None], x1, -127).amax(-2)
    low, high = torch.where(keep.any(-1, True), low, 0), torch.where(keep.any(-1, True), high, 0)
    steps = 16 * levels + (int(16 * clip) if bits == 2 else 0)
    scale = ((32 * (high - low) + steps) // (2 * steps)).clamp(min=1)
    zero_point = low + ((high - low - scale * levels) >> 1)
    code = torch.round((x1 - zero_point[..., None, :]).float() / scale[..., None, :]).clamp(0, levels)
    return code.to(torch.uint8), scale.to(torch.int8), zero_point.to(torch.int8)


LISTED = 61  # heads that a recipe's list can name, from 0: kernels take the list as bits of an integer
RECODED = 2**22  # bytes of codes that `recode` processes at a time, to limit its extra memory
PRIORITIES = ("priority", "min_max", "variation")  # kernels identify a priority by its index


@dataclass(frozen=True)
class FlashQFormat(MixedHeads, AgedBlocks, Format):
    """INT8 ring, blocks with 8, 4 or 2 bits.

    Attributes:
        bits: 8, 4, 2, or `mixed`: `n_low` heads of the layer get 2 bits, the others 4.
        aged: with 8 or 4 bits, the first `aged` blocks of each row have half the bits; None: all blocks have the same.
        n_low: number of 2-bit heads; used with `mixed` only.
        priority: how 2-bit heads are chosen when a row's first block closes (see `head_priority`).
        low_heads: fixed list of 2-bit heads from a recipe, for all rows; overrides `priority`.
        clip: shrinks the 2-bit range, see `stage_two`.
        buffer_scale: `token`, or the paper's `universal`: one scale per row and head; later values are clamped and
            counted.
    """

    bits: int | str = 4
    n_low: int = 0
    priority: str = "priority"
    low_heads: tuple[int, ...] | None = None
    clip: float = 0.0
    buffer_scale: str = "token"
    aged: int | None = None

    name = "flashq"
    windowed = True
    block_scales = True

    @property
    def mixed(self) -> bool:
        return self.bits == "mixed"

    @property
    def least_heads(self) -> int:
        return max(1, self.n_low)

    def kernel_limits(self, side: str, dim: int) -> str | None:
        if self.buffer_scale != "token":
            return f"buffer_scale is {self.buffer_scale!r}; the kernels scale the buffer by token"
        last = max(self.low_heads or (0,))
        if last >= LISTED:
            return f"head {last} is listed; the kernels know lists of the first {LISTED} heads"
        if self.mixed and self.low_heads is None and self.priority not in PRIORITIES:
            return f"priority is {self.priority!r}; the kernels rank by {', '.join(PRIORITIES)}"
        return None

    def kernel_bits(self, heads: int) -> int:
        return 8 if self.bits == 8 else {0: 4, heads: 2}.get(self.low(heads), 0)

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        plain, low = super().side(heads, dim, block, values), self.low_kind(heads)
        widths: tuple[int, ...] = (4, 2) if low > Low.ALL else (plain.BITS,)
        if self.ages:
            widths = (plain.BITS // 2, plain.BITS)
        rank = PRIORITIES.index(self.priority) if low == Low.RANKED else -1
        return plain._replace(WIDTHS=widths, CLIP=int(16 * self.clip), LOW=int(low), RANK=rank, AGED=self.ages)

    def low_kind(self, heads: int) -> Low:
        if not self.low(heads):
            return Low.NONE
        if self.low(heads) == heads:
            return Low.ALL
        return Low.RANKED if self.low_heads is None else Low.LISTED

    def asks_registers(self, heads: int) -> bool:
        return self.low_kind(heads) == Low.NONE

    def of_process(self, own: range, size: int) -> Format:
        if self.low_heads is not None:
            listed = tuple(head - own.start for head in self.low_heads if head in own)
            return replace(self, n_low=len(listed), low_heads=listed)
        if self.n_low % size:
            raise ValueError(
                f"the {self.n_low} heads with 2 bits do not divide among {size} processes: take another n_h, or list "
                "them (k_low_heads, v_low_heads)"
            )
        return replace(self, n_low=self.n_low // size)

    def settled(self, heads: int) -> dict[str, list[int]]:
        if self.low_kind(heads) == Low.RANKED:
            return {}
        return {"head_of": sorted(range(heads), key=lambda head: head in (self.low_heads or ()))}

    @property
    def fixed(self) -> dict[str, FixedBy]:
        universal = {"universal": FixedBy.TOKENS} if self.buffer_scale == "universal" else {}
        return {"head_of": FixedBy.BLOCK, **universal}

    def low(self, heads: int) -> int:
        """Return how many of `heads` heads get 2 bits."""
        return self.n_low if self.bits == "mixed" else heads if self.bits == 2 else 0

    def spans(self, blocks: int) -> list[Span]:
        assert isinstance(self.bits, int)
        aged = min(self.aged or 0, blocks)
        young = Span(self.bits, aged, blocks)
        return [Span(self.bits // 2, 0, aged), young] if aged else [young]

    def with_bits(self, bits: int, aged: int | None) -> Format:
        return replace(self, bits=bits, aged=aged)

    def _held(self, heads: int, blocks: int) -> dict[int, tuple[int, int]]:
        """Return, per bit width, the number of heads and of blocks per row that use it."""
        if self.mixed:
            return {4: (heads - self.n_low, blocks), 2: (self.n_low, blocks)}
        return {bits: (heads, end - first) for bits, first, end in self.spans(blocks)}

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        b, h, n = geo.batch, geo.heads, geo.blocks

        held = self._held(h, n)

        def codes(bits: int) -> TensorSpec:
            heads, blocks = held.get(bits, (0, n))
            tokens, dtype = window.block * bits // 8, torch.int8 if bits == 8 else torch.uint8
            return TensorSpec((b, heads, blocks, *((dim, tokens) if self.transposed else (tokens, dim))), dtype, 0, 2)

        specs = {
            **{f"codes{bits}": codes(bits) for bits in (8, 4, 2)},
            "head_of": TensorSpec((b, h), torch.int32),
            "channel_scale": TensorSpec((b, h, n, dim), torch.int8, block_dim=2),
            "zero_point": TensorSpec((b, h, n, dim), torch.int8, block_dim=2),
            "scale": TensorSpec((b, h, n), torch.float32, block_dim=2),
        }
        if self.buffer_scale == "universal":
            specs["universal"] = TensorSpec((b, h), torch.float32)
            specs["clamped"] = TensorSpec((b, h), torch.int64)
        return specs

    def places_known(self, state: State, closed: torch.Tensor) -> bool:
        head_of = state["head_of"]
        every = torch.arange(head_of.shape[1], device=head_of.device)
        placed = (head_of.sort(-1).values == every).all(-1)
        return bool((placed | ((closed == 0) & (head_of == 0).all(-1))).all())

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return int8_ring(geo, slots, dim, self.transposed)

    @property
    def token_levels(self) -> int | None:
        return INT8_LEVELS if self.buffer_scale == "token" else None

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        return self._universal(new, state) if self.token_levels is None else super().quantize_tokens(new, state)

    def requantize(self, x: torch.Tensor) -> Operand:
        return int8_tokens(x)

    def _universal(self, new: Arrival, state: State) -> Operand:
        """Quantize with the paper's single scale per row.

        The scale comes from a first call of at least a block, or else from the row's first block of tokens."""
        tokens, block = int8_tokens(new.x), new.block
        start, total = new.length[:, None], (new.length + new.count)[:, None]
        pos = new.length[:, None] + torch.arange(new.x.shape[2], device=new.x.device)
        real = new.real[:, None]
        whole = (tokens.scales * real).amax(-1)
        ring = state["ring_scale"][..., :block]
        older = torch.arange(ring.shape[-1], device=ring.device) < start
        head = (tokens.scales * (real & (pos < block)[:, None])).amax(-1)
        head = torch.maximum((ring * older[:, None]).amax(-1), head)
        at_once = (start == 0) & (total >= block)
        fixes = (state["universal"] == 0) & (total >= block)
        state["universal"].copy_(torch.where(fixes, torch.where(at_once, whole, head), state["universal"]))
        scale = state["universal"]
        applies = (scale > 0)[..., None] & (at_once[..., None] | (pos >= block)[:, None])
        code = torch.round(new.x / torch.where(scale > 0, scale, 1.0)[..., None, None])
        beyond = (code.abs() > INT8_LEVELS) & applies[..., None] & real[..., None]
        state["clamped"].add_(beyond.sum((-1, -2)))
        fixed = code.clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
        own = (tokens.scale == 0) | ~applies
        return Operand(
            torch.where(applies[..., None], fixed, tokens.x), torch.where(own, tokens.scales, scale[..., None])
        )

    def first_stage(self, tokens: Operand, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `X1` of the tokens of blocks, and its scale, from `stage_one`."""
        return stage_one(tokens, keep)

    def block_form(self, tokens: Operand, state: State) -> Operand:
        return self._operand(*self.first_stage(tokens))

    def _operand(self, x1: torch.Tensor, scale: torch.Tensor) -> Operand:
        """Return `X1` with one scale per token."""
        return Operand(x1, self.of_tokens(scale).expand(x1.shape[:-1]))

    def of_tokens(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scales of `first_stage` per token, `[..., 1 or block]`."""
        return scale[..., None]

    def as_stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Convert the scales of `first_stage` to their stored form."""
        return scale

    def restored(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert stored scales back to fp32, the inverse of `as_stored`."""
        return stored

    def write(self, state: State, block: Block) -> None:
        x1, scale = self.first_stage(block.tokens, block.keep)
        self._place_heads(state, x1, scale, block)
        write_rows(state["scale"], block.index, block.write, self.as_stored(scale))
        if not self.mixed:
            for bits, first, end in self.spans(state["scale"].shape[2]):
                if end > first:
                    inside = block.write & (first <= block.index) & (block.index < end)
                    packed, *ranges = self._second(x1, block.keep, bits)
                    write_rows(state[f"codes{bits}"], block.index.clamp(first, end - 1) - first, inside, packed)
                    for name, values in zip(("channel_scale", "zero_point"), ranges, strict=True):
                        write_rows(state[name], block.index, inside, values)
            return
        head_of = state["head_of"].long()
        wide = state["codes4"].shape[1]
        scales, zero_points = [], []
        for bits, heads in ((4, head_of[:, :wide]), (2, head_of[:, wide:])):
            if heads.shape[1] == 0:
                continue
            rows = torch.arange(len(heads), device=heads.device)[:, None]
            packed, channel_scale, zero_point = self._second(x1[rows, heads], block.keep[rows, heads], bits)
            write_rows(state[f"codes{bits}"], block.index, block.write, packed)
            scales.append(channel_scale)
            zero_points.append(zero_point)
        by_head = head_of[..., None].expand(-1, -1, x1.shape[-1])
        for name, parts in (("channel_scale", scales), ("zero_point", zero_points)):
            values = torch.cat(parts, 1)
            write_rows(state[name], block.index, block.write, torch.empty_like(values).scatter_(1, by_head, values))

    def _packed(self, code: torch.Tensor, bits: int) -> torch.Tensor:
        packed = pack(code, bits)
        return packed.transpose(-1, -2) if self.transposed else packed

    def _unpacked(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        codes = codes if bits == 8 else unpack(codes, bits, -1 if self.transposed else -2).view(torch.int8)
        return codes.mT if self.transposed else codes

    def _place_heads(self, state: State, x1: torch.Tensor, scale: torch.Tensor, block: Block) -> None:
        """Choose each head's place in the arenas when a row's first block closes; 4-bit places come first."""
        heads = x1.shape[1]
        if self.low_heads is not None:
            low = torch.zeros(heads, dtype=torch.bool, device=x1.device)
            for head in self.low_heads:  # indexing by a list copies it to the device, which CUDA graph capture forbids
                low[head] = True
            low = low.expand(len(x1), -1)
        elif 0 < self.low(heads) < heads:
            rank = head_priority(x1, scale, block.keep, self.priority).argsort(dim=-1, stable=True).argsort(-1)
            low = rank < self.n_low
        else:
            low = torch.zeros(x1.shape[:2], dtype=torch.bool, device=x1.device)
        places = low.int().argsort(dim=-1, stable=True).int()
        first = (block.write & (block.index == 0))[:, None]
        state["head_of"].copy_(torch.where(first, places, state["head_of"]))

    def read(self, state: State, blocks: int) -> Operand:
        code = self._read_mixed(state, blocks) if self.mixed else self._read_plain(state, blocks)
        channel_scale, zero_point = (state[name].narrow(2, 0, blocks) for name in ("channel_scale", "zero_point"))
        x1 = code * channel_scale.unsqueeze(3)  # may leave INT8 and wrap around; the sum wraps back
        return self._operand(x1.add_(zero_point.unsqueeze(3)), self.restored(state["scale"].narrow(2, 0, blocks)))

    def recode(self, state: State, new: AgedBlocks, out: State, keep: torch.Tensor, closed: torch.Tensor) -> None:
        """Repack blocks whose bits change: apply the second stage to their dequantized `X1`.

        Channel scales and zero points change too. From 8 bits the result equals packing at once."""
        n = keep.shape[2]
        for old, young, run, own, theirs in pieces(self.spans(n), new.spans(n)):
            source, target = state[f"codes{old.bits}"][:, :, own], out[f"codes{young.bits}"][:, :, theirs]
            if old.bits == young.bits:
                target.copy_(source)
                continue
            parts = -(-source.numel() // RECODED)
            ranges = [out[name][:, :, run] for name in ("channel_scale", "zero_point")]
            there = closed[:, None, run, None]
            split = (
                x.tensor_split(min(parts, x.shape[2]), 2) for x in (source, target, *ranges, keep[:, :, run], there)
            )
            for codes, place, scale, zero_point, kept, used in zip(*split, strict=True):
                x1 = self._unpacked(codes, old.bits).to(torch.int16) * scale[..., None, :] + zero_point[..., None, :]
                coded, *found = self._second(x1, kept, young.bits)
                place.copy_(torch.where(used[..., None], coded, 0))
                scale.copy_(torch.where(used, found[0], 0))
                zero_point.copy_(torch.where(used, found[1], 0))

    def _second(self, x1: torch.Tensor, keep: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
        """Return packed codes, channel scales and zero points of `X1`."""
        code, scale, zero_point = stage_two(x1, keep, bits, self.clip)
        return self._packed(code, bits), scale, zero_point

    def _read_plain(self, state: State, blocks: int) -> torch.Tensor:
        codes = [(bits, state[f"codes{bits}"][:, :, : end - first]) for bits, first, end in self.spans(blocks)]
        parts = [self._unpacked(packed, bits) for bits, packed in codes]
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def _read_mixed(self, state: State, blocks: int) -> torch.Tensor:
        codes = [self._unpacked(state[f"codes{bits}"][:, :, :blocks], bits) for bits in (4, 2)]
        code = torch.cat([c for c in codes if c.shape[1]], 1)
        if codes[0].shape[1] and codes[1].shape[1]:
            place_of = state["head_of"].argsort(-1)
            code = code[torch.arange(len(code), device=code.device)[:, None], place_of]
        return code

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        if self.bits == 8:
            return [[8] * heads for _ in state["head_of"]]
        wide = heads - self.low(heads)
        rows = []
        for places in state["head_of"].tolist():
            decided = len(set(places)) == heads  # places are all zero until the row's first block closes
            bits = [4] * heads if wide == heads else [2] * heads if wide == 0 else [0] * heads
            for place, head in enumerate(places if decided else []):
                bits[head] = 4 if place < wide else 2
            rows.append(bits)
        return rows
