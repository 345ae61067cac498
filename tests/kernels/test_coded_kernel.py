"""Codes that a call computes, compared with codes made by hand: who shares a scale, and which mean is subtracted.

SageAttention2, sections 3.1 to 3.5: reference and kernels over keys and values in a stock cache's layout, and queries
of a decode.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
from helpers import DEVICE, SAGE1, Case, attention_fp64, error, feed, make_layer, random_qkv
from test_fused_kernels import dequantize, step

from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.state import side_of
from qattn_kernels.ops.prefill.coded import with_codes
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step
from qattn_kernels.step.stock_cache import _rows, _unpacked, attend_over

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
OFFSET, TOKENS, DIM = 50, 150, 64  # queries of two blocks of 128, keys of four of 64
SCALE = Scores(DIM**-0.5)
LIMIT = {"reference": 1e-5, "triton": 2e-3}  # rounding of fp32; a code that rounds the other way


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one row's queries of two heads, and keys and values of one head.

    Some tokens are far larger than others, channels have means, and the key mask has holes over the largest numbers.
    """
    g = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS), (1, OFFSET + TOKENS), (1, OFFSET + TOKENS))
    q, k, v = (torch.randn(1, heads, n, DIM, generator=g) for heads, n in shapes)
    for x in (q, k):
        x *= torch.randn(*x.shape[:3], 1, generator=g).exp()
        x[..., ::5] += torch.randn(*x.shape[:2], 1, 13, generator=g)
    v[..., ::3] += torch.randn(22, generator=g).exp()
    mask = torch.ones(1, OFFSET + TOKENS, dtype=torch.bool)
    mask[:, 3:9] = mask[:, 40:44] = False
    k[:, :, ~mask[0]] = v[:, :, ~mask[0]] = 50.0
    return q, k, v, mask


def attended(impl: str, settings: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
    spec = dataclasses.replace(get_method("paper_sage2")(cache="model", **settings).last_layer_spec(1), impl=impl)
    return attend_over(*(x.to(DEVICE) for x in tensors), OFFSET, spec, SCALE)[0].cpu()


def shared(x: torch.Tensor, members: list, levels: int) -> torch.Tensor:
    """Round `x` fp64 `[n, D]` to `levels` levels. Rows with equal `members` share the scale of their largest number."""
    out = torch.empty_like(x)
    for group in set(members):
        rows = [i for i, member in enumerate(members) if member == group]
        scale = x[rows].abs().max() / levels
        out[rows] = torch.round(x[rows] / scale) * scale
    return out


def query_group(granularity: str, n: int) -> Any:
    """Section 3.3: a block has 128 queries, a warp 32 of them, and a thread every eighth query of its warp."""
    return {"token": n, "thread": (n // 32, n % 8), "block": n // 128, "tensor": 0}[granularity]


def key_group(granularity: str, n: int) -> Any:
    """64 keys are a block, and a thread has two neighbours of eight."""
    return {"token": n, "thread": (n // 64, n % 8 // 2), "block": n // 64, "tensor": 0}[granularity]


class Codes(NamedTuple):
    """How scores are coded; `levels` 0: not at all."""

    granularity: str = "thread"
    levels: int = 127
    smooth_k: bool = True
    smooth_q: str = "none"


def of_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Return fp64 outputs `[T, D]` of one head: `q` `[T, D]`, `k`, `v` `[S, D]`. The head sees the columns `seen`."""
    q, k, v = q.double() * SCALE.scale, k[seen].double(), v[seen].double()
    size = {"none": len(q), "tensor": len(q), "block": 128}[codes.smooth_q]
    q_mean = torch.cat([part.mean(0).expand_as(part) for part in q.split(size)]) * (codes.smooth_q != "none")
    k_mean = k.mean(0) * codes.smooth_k
    turned = [q - q_mean, k - k_mean]
    if codes.levels:
        groups = (query_group, range(len(q))), (key_group, seen.tolist())
        members = [[group(codes.granularity, n) for n in places] for group, places in groups]
        turned = [shared(x, of, codes.levels) for x, of in zip(turned, members, strict=True)]
    s = turned[0] @ turned[1].T + q_mean @ (k - k_mean).T + q @ k_mean[:, None]
    later = seen > torch.arange(len(q))[:, None] + OFFSET
    return s.masked_fill(later, -math.inf).softmax(-1) @ v


def by_hand(tensors: tuple[torch.Tensor, ...], codes: Codes) -> torch.Tensor:
    q, k, v, mask = tensors
    return torch.stack([of_head(head, k[0, 0], v[0, 0], mask[0].nonzero()[:, 0], codes) for head in q[0]])[None]


CODES = [
    ({"bits": 4}, Codes("thread", 7, True, "tensor")),  # what four bits need is on if nobody asks
    ({"bits": 4, "granularity": "token", "smooth_q": "block"}, Codes("token", 7, True, "block")),
    ({"bits": 4, "granularity": "block", "smooth_k": False, "smooth_q": "none"}, Codes("block", 7, False)),
    ({"bits": 4, "granularity": "tensor"}, Codes("tensor", 7, True, "tensor")),
    ({"bits": 8, "smooth_q": "none"}, Codes()),
    (SAGE1, Codes("block")),
]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(("settings", "codes"), CODES, ids=lambda x: "-".join(map(str, x)) if type(x) is Codes else "")
def test_codes_of_queries_and_keys(settings: dict[str, Any], codes: Codes, impl: str):
    """Values and weights are unquantized, so only fp32 rounding remains.

    Kernels may round a code the other way. If a block has one scale, that adds up to one unit of an integer sum, less
    than a quarter of the codes' error.
    """
    if impl == "triton" and codes.granularity == "tensor":
        pytest.skip("the kernels have no scale of a whole tensor")
    tensors = inputs()
    want = by_hand(tensors, codes)
    limit = LIMIT[impl]
    if impl == "triton" and codes.granularity == "block":
        limit = error(by_hand(tensors, codes._replace(levels=0)), want) / 4
    assert error(attended(impl, {"pv": "model", **settings}, *tensors), want) < limit
    others = [codes._replace(granularity=other) for other in ("token", "thread", "block", "tensor")]
    others += [codes._replace(smooth_q=other) for other in ("none", "tensor", "block") if codes.smooth_q != "none"]
    assert min(error(by_hand(tensors, other), want) for other in others if other != codes) > 1.2 * limit


@pytest.mark.parametrize("granularity", ["token", "thread", "block"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("smooth_k", [True, False])
def test_codes_of_stored_keys(granularity: str, bits: int, smooth_k: bool):
    """What a packed cache holds has the same groups, around the mean of the row's first block if that is asked for."""
    _, k, v, _ = inputs()
    layer = make_layer(("sage2", {"granularity": granularity, "bits": bits, "smooth_k": smooth_k}), heads=1)
    feed(layer, torch.zeros(1, 1, 128, DIM), k[:, :, :128], v[:, :, :128], [128])
    held = layer.spec.k.read(side_of(layer.state, "k"), 2).dequantize()[0, 0].flatten(0, 1)
    mean = k[0, 0, :64].double().mean(0) * smooth_k
    codes = shared(k[0, 0, :128].double() - mean, [key_group(granularity, n) for n in range(128)], 2 ** (bits - 1) - 1)
    assert error(held, codes + mean) < LIMIT["reference"]


@pytest.mark.parametrize("smooth_q", ["none", "tensor"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_padding_has_no_part_in_codes(impl: str, smooth_q: str):
    """A row with padding after its tokens is coded as the row alone, whatever the padding holds.

    Queries of padding read the row's tokens, so their outputs are averages of the row's values.
    """
    q, k, v, mask = inputs()
    settings = {"bits": 4, "smooth_q": smooth_q, "pv": "model"}
    alone = attended(impl, settings, q[:, :, :-10], k[:, :, :-10], v[:, :, :-10], mask[:, :-10])
    mask[:, -10:] = False
    q[:, :, -10:] = k[:, :, -10:] = v[:, :, -10:] = 50.0
    padded = attended(impl, settings, q, k, v, mask)
    assert error(padded[:, :, :-10], alone.double()) < LIMIT[impl]
    assert padded[:, :, -10:].any()
    assert padded[:, :, -10:].abs().max() <= v[:, :, :-10].abs().max() * (1 + LIMIT[impl])


FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize(
    ("impl", "pv", "smooth_v"),
    [
        ("reference", "e4m3", False),
        ("reference", "e4m3", True),
        ("reference", "e5m2", False),
        ("triton", "e4m3", False),
        ("triton", "e4m3", True),
    ],
)
def test_codes_of_values(impl: str, pv: str, smooth_v: bool):
    """Each channel has the scale of its largest number over all tokens that the call sees, around its mean if smoothed.

    Queries of zeros weigh all visible tokens equally, with weights that FP8 represents exactly. One value of thousands
    may round the other way.
    """
    q, k, v, mask = inputs()
    kind, largest = FORMATS[pv]
    seen = mask[0].nonzero()[:, 0]
    x = v[0, 0, seen].double()
    mean = x.mean(0) * smooth_v
    scale = (x - mean).abs().amax(0) / largest
    codes = ((x - mean) / scale).float().to(kind).double() * scale + mean
    want = torch.stack([codes[seen <= OFFSET + t].mean(0) for t in range(TOKENS)]).expand(1, 2, -1, -1)
    got = attended(impl, {"pv": pv, "smooth_v": smooth_v}, torch.zeros_like(q), k, v, mask)
    assert error(got, want) < 2e-4
    exact = torch.stack([x[seen <= OFFSET + t].mean(0) for t in range(TOKENS)]).expand(1, 2, -1, -1)
    assert error(exact, want) > 1e-3


@pytest.mark.parametrize(("impl", "pv"), [("reference", "e4m3"), ("triton", "e4m3"), ("reference", "int8")])
def test_codes_of_weights(impl: str, pv: str):
    """Keys have one channel and values are 0 or 1, so all their codes are exact, and channel `i` gets the weights of
    block `i`.

    The largest FP8 weight so far, here the first token's, is 448. Weights of block 1 are then normal numbers, and the
    weight of block 2 is halfway between two of the smallest numbers. The largest INT8 weight of a block is 127.
    """
    total = OFFSET + TOKENS
    scores = torch.full((total,), -60.0)
    scores[:64], scores[64:128], scores[128:192] = torch.linspace(0, -3, 64), torch.linspace(-8, -7, 64), -11.9
    q, k, v = torch.zeros(1, 2, TOKENS, DIM), torch.zeros(1, 1, total, DIM), torch.zeros(1, 1, total, DIM)
    q[..., 0], k[..., 0] = 8.0, scores
    for i in range(3):
        v[:, :, 64 * i : 64 * (i + 1), i] = 1.0
    got = attended(
        impl, {"granularity": "token", "smooth_k": False, "pv": pv}, q, k, v, torch.ones(1, total, dtype=torch.bool)
    )
    p = scores.double().exp()
    blocks = p[:192].view(3, 64)
    if pv == "e4m3":
        blocks = (blocks * 448).float().to(torch.float8_e4m3fn).double() / 448
    else:
        top = blocks.amax(1, keepdim=True) / 127
        blocks = torch.round(blocks / top) * top
    want = blocks.sum(1) / p.sum()
    rtol = 2e-3 if pv == "e4m3" else 1e-5  # one weight of 64 may round the other way, by a sixteenth; that of sums
    torch.testing.assert_close(got[0, 0, -1, :3].double(), want, rtol=rtol, atol=0)
    assert want[2] > 1.2 * p[128:192].sum() / p.sum() or pv == "int8"


@pytest.mark.parametrize(
    ("case", "levels", "run"),
    [
        (("int_flash", {"mode": "half", "bits": 4}), 7, reference_step),
        (("int_flash", {"mode": "half", "bits": 4}), 7, fused_step),
        (("sage2", {"bits": 4, "pv": "model"}), 127, reference_step),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else getattr(x, "__name__", ""),
)
def test_queries_of_a_decode(case: Case, levels: int, run: Any):
    """Each query has its own scale, independent of the prefill.

    INT-FlashAttention's queries have as many bits as its keys. Kernels round 8-bit queries more finely than required.
    """
    q, k, v = (x.to(DEVICE) for x in random_qkv(1, 129, dim=DIM))
    q[:, :, 128, 0] *= 9
    layer = make_layer(case, 192)
    step(reference_step, layer, (q, k, v), 0, 128)
    out = step(run, layer, (q, k, v), 128, 129)[0].cpu()
    want, other = (_of_levels(q[:, :, 128:].cpu().double(), most, layer) for most in (levels, 134 - levels))
    assert error(out, want) < 1e-3 < error(other, want) / 5


def _of_levels(q: torch.Tensor, levels: int, layer: QAttnLayer) -> torch.Tensor:
    scale, held = q.abs().amax(-1, keepdim=True) / levels, (x.cpu() for x in dequantize(layer, 129))
    return attention_fp64(torch.round(q / scale) * scale, *held)


@pytest.mark.parametrize("pv", ["int8", "e4m3"])
def test_values_get_the_same_codes_where_keys_have_theirs(pv: str):
    q, k, v, mask = (x.to(DEVICE) for x in inputs())
    spec = get_method("paper_sage2")(cache="model", pv=pv).last_layer_spec(1)
    rows = _rows(mask, torch.tensor([OFFSET], device=DEVICE), TOKENS)
    unpacked = _unpacked(k, v, mask, rows, spec)
    both = with_codes(q, unpacked, spec, SCALE.scale)
    coded = unpacked._replace(k=both.k, k_scale=both.k_scale)
    alone = with_codes(q, coded, spec, SCALE.scale)
    assert alone.k is both.k and alone.k_scale is both.k_scale
    end = mask.shape[1]
    assert torch.equal(alone.v.view(torch.uint8)[..., :end], both.v.view(torch.uint8)[..., :end])
    scales = ("v_scale",) if pv == "int8" else ("v_channel", "v_mean")
    for name in scales:
        one, other = getattr(alone, name), getattr(both, name)
        assert (one is None and other is None) or torch.equal(one[..., :end], other[..., :end])
