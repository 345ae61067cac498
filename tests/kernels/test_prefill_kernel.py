"""The prefill kernel over unpacked keys and values made by hand: against fp64 attention over what they hold, and the
reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import DEVICE, error

from qattn_kernels.formats import Operand, get_format
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.formats.flashq.reference import stage_one
from qattn_kernels.formats.int8_block.reference import Int8BlockFormat
from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute, LayerSpec, Sparsity
from qattn_kernels.layout import ROW_FIELDS, Window
from qattn_kernels.ops.prefill.launch import prefill
from qattn_kernels.reference.attention import attend
from qattn_kernels.reference.operands import operands
from qattn_kernels.reference.queries import long_queries
from qattn_kernels.reference.query_parts import in_columns, query_parts
from qattn_kernels.reference.rows import columns_back
from qattn_kernels.reference.tiles import FOREVER, Tiles, visible

BLOCK = 64


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@dataclass(frozen=True)
class Case:
    """A call of `tokens` columns after `past` tokens, with `hq` query heads over `heads`.

    Row `b` has the columns `spans[b]` `(first, count)`. `form` is the form of unpacked keys and values: `flashq`
    blocks, `int8` tokens, `model` for the model's dtype, `full` for INT8 key tokens and value blocks, or `half` for
    INT8 key tokens and unquantized values. `short`: a crop removed the first block's last tokens. `masked`: some tokens
    are masked.
    """

    tokens: int = 65
    past: int = 0
    hq: int = 2
    heads: int = 1
    dim: int = 64
    dim_v: int = 0
    kind: str = "normal"
    form: str = "flashq"
    dtype: torch.dtype = torch.float32
    spans: tuple[tuple[int, int], ...] = ()
    short: int = 0
    masked: bool = False
    block: int = BLOCK

    @property
    def forms(self) -> tuple[str, str]:
        return {"full": ("int8", "int8_block"), "half": ("int8", "model")}.get(self.form, (self.form, self.form))

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        return self.spans or ((0, self.tokens),)


def data(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[B, Hq, T, D]`, keys and values `[B, Hkv, n, block, D]` of the slots."""
    g = torch.Generator().manual_seed(case.tokens + case.past)
    n, rows = -(-(case.past + case.short + case.tokens) // case.block) + 1, len(case.rows)
    q = torch.randn(rows, case.hq, case.tokens, case.dim, generator=g)
    k = torch.randn(rows, case.heads, n, case.block, case.dim, generator=g)
    v = torch.randn(rows, case.heads, n, case.block, case.dim_v or case.dim, generator=g)
    k[..., 3] += 4
    if case.kind == "peaked":
        q *= 4
    if case.kind == "steep":  # as trained models have it: a unit of the integer sums is worth a lot
        q *= 60
    if case.kind == "outlier":
        k[..., 7] *= 12
        v[..., 5] += 9
        v[:, :, :, 11] = 0
    if case.kind == "silent":
        v[:, :, 0] = 0  # weighs like any other block
    q, k, v = (x.to(case.dtype).float() for x in (q, k, v))
    return q, k, v


def tiles_of(case: Case, k: torch.Tensor, v: torch.Tensor) -> tuple[Tiles, torch.Tensor]:
    """Tiles as the reference would see them, and `UnpackedKV.rows`."""
    rows, heads, n, block = k.shape[:4]
    closed = (case.past + case.short) // block
    slot = torch.arange(n * block).view(n, block)
    pos = slot - torch.where(slot < block, 0, case.short)
    end = case.past + torch.tensor([count for _, count in case.rows])
    valid = (pos < end[:, None, None]) & ~((slot < block) & (slot >= block - case.short))
    keep = valid[:, None].expand(-1, heads, -1, -1).clone()
    if case.masked:
        keep &= torch.rand(keep.shape, generator=torch.Generator().manual_seed(1)) > 0.2
    start = closed * block - case.short
    closing = (end - start) // block
    fields = torch.zeros(rows, ROW_FIELDS, dtype=torch.int32)
    for i, x in enumerate((case.past, closed, start, closing, *torch.tensor(case.rows).unbind(1))):
        fields[:, i] = x
    full = (torch.arange(n) < (closed + closing)[:, None])[:, None, :, None]

    def side(x: torch.Tensor, form: str) -> Operand:
        if form == "model":
            return Operand(x, None)
        if form == "int8_block":
            return Int8BlockFormat().block_form(Operand(x, None), {})
        coded = int8_tokens(x)
        if form == "int8":
            return coded
        x1, scale = stage_one(coded)
        codes = torch.where(full[..., None], x1, coded.x)
        return Operand(codes, torch.where(full, scale[..., None].expand_as(coded.scales), coded.scales))

    pos = pos.expand(rows, -1, -1).int()[:, None]
    since = torch.where(valid[:, None], pos, FOREVER).int()
    return Tiles(*map(side, (k, v), case.forms), pos, since, torch.full_like(since, FOREVER), keep), fields


def unpacked_of(case: Case, tiles: Tiles, fields: torch.Tensor, compute: str = "int8") -> UnpackedKV:
    """The same as unpacked keys and values for a prefill in that arithmetic, their unseen slots full of numbers that
    must not matter."""
    dead = ~tiles.keep

    def side(x: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
        coded = x.scale is not None and compute == "int8"
        codes = x.x if coded else x.dequantize().to(case.dtype)
        codes = torch.where(dead[..., None], 101, codes).to(codes.dtype).flatten(2, 3)
        return codes, torch.where(dead, 1e30, x.scales).flatten(2, 3).to(DEVICE) if coded else None

    (k, k_scale), (v, v_scale) = side(tiles.k), side(tiles.v)
    v = v if v_scale is None else v.transpose(2, 3).contiguous()
    bias = torch.where(dead, -math.inf, 0.0).flatten(2, 3)
    pos = tiles.pos.flatten(1).contiguous()
    return UnpackedKV(k.to(DEVICE), k_scale, v.to(DEVICE), v_scale, bias.to(DEVICE), pos.to(DEVICE), fields.to(DEVICE))


def exact(q: torch.Tensor, see: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """fp64 attention of `q` `[B, Hq, T, D]` over `k`, `v` `[B, Hkv, n, block, D]`, `see` as `visible` gives it."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().flatten(2, 3).repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.mT * scores.scale
    s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
    s = s.masked_fill(~see.flatten(3).repeat_interleave(group, 1), -math.inf)
    sinks = torch.full((q.shape[1],), -math.inf) if scores.sinks is None else scores.sinks
    s = torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1).nan_to_num(0.0)[..., :-1] @ v


def spec_of(case: Case, **compute: Any) -> LayerSpec:
    k, v = (get_format(form)() for form in case.forms)
    return LayerSpec(k, v, Window(block=case.block), Compute(**compute))


def check(case: Case, scores: Scores | None = None, sas_gap: float = 0.0, **compute: Any) -> None:
    """The kernel errs at most 1.5 times as much as the reference, or a quarter of what the codes cost."""
    scores = scores or Scores(case.dim**-0.5)
    spec = spec_of(case, **compute)
    q, k, v = data(case)
    tiles, fields = tiles_of(case, k, v)
    span = fields[:, 4:6]
    parts, wants = query_parts(q, span, torch.full_like(span[:, 0], case.past)), []
    over = plain = padding = 0.0
    for part in parts:
        queries = long_queries(part.q, scores.scale, spec.compute, part.pos >= 0)
        wants.append(attend(queries, part.pos, operands(tiles, spec), scores, spec.compute, Sparsity(), prefill=True))
        see = visible(tiles, part.pos, scores.window)
        over = over + columns_back(exact(part.q, see, tiles.k.dequantize(), tiles.v.dequantize(), scores), part.span)
        plain = plain + columns_back(exact(part.q, see, k, v, scores), part.span)
        padding = padding + columns_back(torch.ones_like(wants[-1].out), part.span)
    want_out, want_lse = in_columns(parts, wants, torch.float32)

    on_device = scores._replace(sinks=None if scores.sinks is None else scores.sinks.to(DEVICE))
    wide = q.to(case.dtype).transpose(1, 2).contiguous().transpose(1, 2)  # strides as a model's projection leaves them
    unpacked = unpacked_of(case, tiles, fields, spec.compute.prefill)
    out, lse = (x.cpu() for x in prefill(wide.to(DEVICE), unpacked, spec, on_device))
    assert out.dtype == case.dtype and out.transpose(1, 2).is_contiguous()
    # a unit of an integer sum is a thousandth of a large score; each rounded weight is off by 0.29 / 127, independently
    # if tiles differ: 200 weights are off by 0.03, and three times that is allowed
    atol = 0.1 if spec.compute.round_sum else 2e-2
    torch.testing.assert_close(lse, want_lse, atol=atol, rtol=1e-3)
    own, codes = error(want_out, over), error(over, plain)
    rounding = 0.0 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps  # the interpreter cuts off bits
    limit = max(1.5 * own, 0.25 * codes, 1e-5) + rounding + sas_gap
    assert error(out, over) <= limit, f"reference {own:.2e}, codes {codes:.2e}"
    assert not out[padding == 0].any()


@pytest.mark.parametrize("kind", ["normal", "peaked", "outlier"])
@pytest.mark.parametrize("form", ["flashq", "int8"])
def test_int8_errs_as_the_reference_does(kind: str, form: str):
    check(Case(tokens=129, past=70, kind=kind, form=form))


@pytest.mark.parametrize("form", ["flashq", "int8"])
def test_no_weight_overflows(form: str):
    """Where a unit of the integer sums is worth a lot, rounding must not lift the largest weight beyond INT8."""
    check(Case(tokens=129, past=384, hq=4, kind="steep", form=form))


@pytest.mark.parametrize(("tokens", "past"), [(33, 0), (63, 192), (64, 0), (65, 127), (64, 128)])
def test_lengths_around_a_block(tokens: int, past: int):
    check(Case(tokens=tokens, past=past))
    check(Case(tokens=tokens, past=past, form="int8", dim=32), prefill="model")


@pytest.mark.parametrize("form", ["flashq", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_precision(form: str, dtype: torch.dtype):
    check(Case(tokens=80, past=100, form=form, dtype=dtype), prefill="model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_of_half_precision_queries(dtype: torch.dtype):
    check(Case(tokens=80, past=100, dtype=dtype))


@pytest.mark.parametrize(
    ("hq", "heads", "dim", "dim_v"),
    [(3, 1, 80, 0), (8, 2, 96, 0), (24, 2, 64, 0), (8, 1, 32, 16), (2, 2, 128, 0), (1, 1, 256, 0), (1, 1, 64, 128)],
)
def test_heads_and_head_dims(hq: int, heads: int, dim: int, dim_v: int):
    case = Case(tokens=40, past=140, hq=hq, heads=heads, dim=dim, dim_v=dim_v)
    check(case)
    check(replace(case, tokens=33, past=0, form="model", hq=heads), prefill="model")


@pytest.mark.parametrize("compute", ["int8", "model"])
def test_padding_masks_and_crops(compute: str):
    """Rows of unlike lengths, one without any token; padding on both sides; masked tokens; a block that a crop
    shortened."""
    spans = ((7, 60), (0, 67), (5, 0), (0, 20), (3, 40))
    form = "flashq" if compute == "int8" else "model"
    check(Case(tokens=67, past=140, hq=1, form=form, spans=spans, masked=True, short=20), prefill=compute)


def test_queries_that_see_nothing():
    case = Case(tokens=34, hq=1, form="int8")
    tiles, fields = tiles_of(case, *data(case)[1:])
    unpacked = unpacked_of(case, tiles._replace(keep=torch.zeros_like(tiles.keep)), fields)
    out, lse = prefill(data(case)[0].to(DEVICE), unpacked, spec_of(case), Scores(0.1))
    assert not out.any() and lse.isneginf().all()


@pytest.mark.parametrize("short", [0, 30])
@pytest.mark.parametrize("compute", ["int8", "model"])
def test_softcap_window_and_sinks(short: int, compute: str):
    case = Case(tokens=70, past=130, short=short)
    sinks = torch.tensor([0.5, 2.0])
    check(case, Scores(0.3, softcap=5.0), prefill=compute)
    check(replace(case, hq=1, spans=((9, 61), (70, 0))), Scores(0.1, window=40), prefill=compute)
    check(case, Scores(0.1, window=150, sinks=sinks), prefill=compute)
    # the first query sees one token of the tile before its own window's other tokens
    check(replace(case, tokens=10, past=131, short=0, hq=1), Scores(0.1, window=5), prefill=compute)
    # a window that reaches from the padding to some of the row's tokens, and to none
    check(replace(case, hq=1, spans=((2, 40), (0, 2), (0, 0))), Scores(0.1, window=40), prefill=compute)
    check(replace(case, hq=1, spans=((2, 40),)), Scores(0.1, window=-64, sinks=sinks[:1]), prefill=compute)


@pytest.mark.parametrize("block_q", [32, 128])
def test_other_blocks_of_queries(block_q: int):
    check(Case(tokens=140, past=130, hq=1), block_q=block_q)


@pytest.mark.parametrize("levels", [127, 7])
@pytest.mark.parametrize(("form", "pv"), [("full", "int8"), ("half", "model")])
def test_queries_with_scales_of_their_own(form: str, pv: str, levels: int):
    """INT-FlashAttention's; one loud query costs the others nothing."""
    how = {"q_scale": "token", "qk_levels": levels, "pv": pv, "pv_levels": 127, "round_sum": True}
    for kind in ("normal", "peaked", "steep", "outlier", "silent"):
        check(Case(tokens=129, past=70, kind=kind, form=form), **how)
    check(Case(tokens=70, past=130, form=form), Scores(0.3, softcap=5.0), **how)
    check(Case(tokens=70, past=130, form=form, hq=1, spans=((9, 61), (70, 0))), Scores(0.1, window=40), **how)


def test_blocks_of_128():
    check(Case(tokens=130, past=140, hq=1, block=128))


@pytest.mark.parametrize("form", ["flashq", "int8", "model"])
def test_sas(form: str):
    """Tightly without the cut; with it the tiles that the kernel takes may keep what the reference cuts."""
    case = Case(tokens=70, past=140, kind="peaked", form=form)
    compute = "model" if form == "model" else "int8"
    check(case, softmax="sas", sas_threshold=-math.inf, prefill=compute)
    check(case, softmax="sas", sas_gap=3e-3, prefill=compute)


SAGE = {"block_q": 128, "q_scale": "thread", "k_scale": "thread", "smooth_k": True, "qk_levels": 127, "pv": "e4m3"}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"qk_levels": 7, "smooth_q": "tensor", "smooth_v": True},
        {"qk_levels": 7, "smooth_q": "block", "q_scale": "token", "k_scale": "token"},
        {"q_scale": "block", "k_scale": "block", "smooth_k": False, "pv": "model"},
        {"q_scale": "block", "k_scale": "block", "softmax": "sas", "sas_threshold": -math.inf},
        {"pv": "int8", "pv_levels": 127},
    ],
    ids=str,
)
def test_codes_made_of_the_models_precision(how: dict[str, Any]):
    """SageAttention2's over any cache: smoothed keys and queries in groups, values in FP8 by channel."""
    how = {**SAGE, **how}
    for kind in ("normal", "outlier"):
        check(Case(tokens=133, past=70, kind=kind, form="model"), **how)
    check(Case(tokens=70, past=130, form="model", masked=True), Scores(0.3, softcap=5.0), **how)
    sinks = torch.tensor([0.5, 2.0])
    check(Case(tokens=70, past=130, form="model", spans=((9, 61), (70, 0))), Scores(0.1, window=40, sinks=sinks), **how)
