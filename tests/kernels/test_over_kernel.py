"""Attention over the keys and values of a stock cache, reference and kernels, against fp64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import DEVICE, SAGE1, error

from qattn_hf.methods import get_method
from qattn_kernels.launch.tuned import Prefill
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.ops.prefill import launch
from qattn_kernels.step.stock_cache import _rows, _unpacked, attend_over

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


def spec_of(impl: str = "reference", **settings: Any) -> LayerSpec:
    made = get_method("paper_sage2")(cache="model", **settings).last_layer_spec(2)
    return dataclasses.replace(made, impl=impl)


def inputs(tokens: int, columns: int, heads: int = 2, dim: int = 64) -> tuple[torch.Tensor, ...]:
    """Queries of four heads, keys and values around means as real ones have, and a key mask with holes in row 0."""
    g = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, h, n, dim, generator=g) for h, n in ((4, tokens), (heads, columns), (heads, columns)))
    k[..., 3] += 8
    v[..., 5] += 2
    key_mask = torch.ones(2, columns, dtype=torch.bool)
    key_mask[0, :7] = key_mask[0, 20:25] = False
    return tuple(x.to(DEVICE) for x in (q, k, v, key_mask))


def exact(q, k, v, key_mask, offset: int, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scores.scale
    s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
    columns = torch.arange(k.shape[2], device=q.device)
    see = columns <= (offset + torch.arange(q.shape[2], device=q.device))[:, None]
    s = s.masked_fill(~(see & key_mask[:, None, None]), -math.inf)
    if scores.sinks is not None:
        s = torch.cat([s, scores.sinks.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]] @ v, s.logsumexp(-1)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"bits": 4, "smooth_v": True},
    {"granularity": "token", "smooth_q": "block", "smooth_k": False, "pv": "model"},
    SAGE1,
    {"pv": "int8"},
    {"prefill_compute": "model"},
]
MORE_SCORES = Scores(64**-0.5, 5.0, 0, torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE))


@pytest.mark.parametrize("scores", [Scores(64**-0.5), MORE_SCORES], ids=["plain", "softcap and sinks"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_reference_against_fp64(settings, scores):
    """The log-sum-exp is that of the true scores.

    Without the mean that smoothing subtracts, its error would far exceed the tolerance.
    """
    q, k, v, key_mask = inputs(70, 150)
    key_mask[1, 105:] = False  # padding after the last token of row 1 reads that row
    want, want_lse = exact(q, k, v, key_mask, 60, scores)
    out, lse = attend_over(q, k, v, key_mask, 60, spec_of(**settings), scores)
    assert error(out, want) < (0.15 if settings.get("bits") == 4 else 0.06)
    assert float((lse - want_lse).abs().max()) < (0.3 if settings.get("bits") == 4 else 0.06)


@pytest.mark.parametrize("scores", [Scores(64**-0.5), MORE_SCORES], ids=["plain", "softcap and sinks"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kernels_against_fp64(settings, scores):
    """The kernels' error is within twice the reference's.

    Keys and values are part of a longer cache, so heads are not adjacent.
    """
    q, k, v, key_mask = inputs(70, 150)
    key_mask[1, 105:] = False
    offset, capacity = 60, 200
    held = [torch.full((2, capacity, 2, 64), 1e4, device=DEVICE).transpose(1, 2) for _ in "kv"]
    for cache, x in zip(held, (k, v), strict=True):
        cache[:, :, :150] = x
    mask = torch.nn.functional.pad(key_mask, (0, capacity - 150), value=True)  # and no token after the new ones
    held[0][:, :, 130:], held[1][:, :, 130:] = 1e4, -1e4
    want = exact(q, k, v, key_mask, offset, scores)
    plain = attend_over(q, k, v, key_mask, offset, spec_of(**settings), scores)
    fused = attend_over(q, *held, mask, torch.tensor(offset), spec_of("triton", **settings), scores)
    for i in range(2):
        assert error(fused[i], want[i]) < 2 * error(plain[i], want[i]) + 1e-4


def test_last_tiles_may_reach_behind_the_last_block_of_codes(monkeypatch):
    """With 150 slots, the last tile of 128 ends 64 slots after the third block, as a launch table may choose.

    The tile lies within the tensors. FP8 numbers there get no weight but must be finite, because the interpreter has no
    NaN in FP8.
    """
    q, k, v, key_mask = inputs(70, 150)
    rows = _rows(key_mask, torch.full((2,), 80, device=DEVICE), 70)
    unpacked = _unpacked(k, v, key_mask, rows, spec_of("triton"))
    assert unpacked.bias.shape[2] == unpacked.pos.shape[1] == 256
    results = []
    for tail in (64, 128):
        monkeypatch.setattr(launch, "prefill_tiles", lambda *_, tail=tail: (Prefill(128, tail, 4, 2),))
        results.append(attend_over(q, k, v, key_mask, 80, spec_of("triton"), Scores(64**-0.5))[0])
    assert error(*results) < 0.02  # weights are of other maxima, and have four bits in FP8


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_padding_before_the_first_token_is_zeros_and_changes_nothing_after_the_last(impl):
    """Padding with large numbers shares no scale with the tokens of its row."""
    q, k, v, key_mask = inputs(70, 70)
    key_mask[1, 40:] = False
    spec = spec_of(impl, smooth_q="block")
    out, lse = attend_over(q, k, v, key_mask, 0, spec, Scores(64**-0.5))
    for x in (out, lse[..., None]):
        assert not x[0, :, :7].any()
        assert x[0, :, 7:].any(-1).all() and x[1].any(-1).all()
    q[1, :, 40:] *= 1e3
    louder, _ = attend_over(q, k, v, key_mask, 0, spec, Scores(64**-0.5))
    assert torch.equal(louder[1, :, :40], out[1, :, :40])


def test_padding_of_a_row_without_a_new_token_shares_no_mean():
    """The row has tokens in the cache, and its new columns are padding alone. Queries taken for real ones would have
    their block's mean subtracted, to which a loud one adds. Both ways in one test, so that each tier has both."""
    q, k, v, key_mask = inputs(32, 64)
    key_mask[1, 32:] = False
    louder = q.clone()
    louder[1, :, 9] *= 1e3
    others = torch.arange(32, device=DEVICE) != 9
    for impl in ("reference", "triton"):
        spec = spec_of(impl, granularity="token", smooth_q="block", smooth_k=False, pv="model")
        out, loud = (attend_over(x, k, v, key_mask, 32, spec, Scores(64**-0.5))[0] for x in (q, louder))
        assert out[1].any() and torch.equal(loud[1, :, others], out[1, :, others]), impl
        assert torch.equal(loud[0], out[0]), impl
