"""The arithmetic over tiles against fp64 attention, the softmax, and the registered operator."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import attention_fp64, error, feed, make_layer, random_qkv

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.layer.arena import Layout, columns_seen, decode_layout
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.layer.spec import decode_spec
from qattn_kernels.reference.rows import bits_to_bool, bool_to_bits, columns_back, real_first
from qattn_kernels.reference.softmax import sas_exp


def test_sas_is_near_the_exponential_and_cuts():
    x = -torch.linspace(0, 20, 40001, dtype=torch.float64)
    got = sas_exp(x.float(), -math.inf)
    assert ((got - x.exp()).abs() / x.exp()).max() < 1.04e-3  # the bound that algorithm SAS states
    cut = sas_exp(torch.tensor([-5.999, -6.0, -6.001, -math.inf]), -6.0)
    assert (cut > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("tokens", [40, 300])
@pytest.mark.parametrize("compute", ["model", "int8"])
def test_softcap_window_and_sinks(tokens: int, compute: str):
    """All three at once, short and long calls over a past, against fp64 on the unpacked format."""
    q, k, v = random_qkv(2, tokens)
    layer = make_layer(("none", {"compute": compute}))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    scores = Scores(0.3, softcap=5.0, window=24, sinks=sinks)
    half, outs, lses = tokens // 2, [], []
    for start, end in ((0, half), (half, tokens)):
        handle, _ = layer.update(k[:, :, start:end], v[:, :, start:end])
        span = torch.tensor([[0, end - start]], dtype=torch.int32)
        out, lse = layer.attend(q[:, :, start:end], handle, span, scores)
        outs.append(out)
        lses.append(lse)
    qd, kd, vd = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))
    s = 5.0 * torch.tanh(qd @ kd.mT * 0.3 / 5.0)
    band = torch.ones(tokens, tokens).tril().triu(-23).bool()
    s = torch.cat([s.masked_fill(~band, -torch.inf), sinks.double().view(1, 4, 1, 1).expand(2, 4, tokens, 1)], -1)
    want = s.softmax(-1)[..., :-1] @ vd
    limit = 1e-5 if compute == "model" else 0.03  # INT8 of random tokens: 1 / (119 * sqrt(12)) a product, two of them
    assert error(torch.cat(outs, 2), want) < limit
    assert (torch.cat(lses, 2) - s.logsumexp(-1)).abs().max() < (1e-4 if compute == "model" else 0.1)


@pytest.mark.parametrize("kind", ["normal", "peaked", "outlier"])
def test_int8_arithmetic_costs_less_than_the_codes(kind: str):
    q, k, v = random_qkv(1, 600, dim=64)
    if kind == "peaked":
        q = q * 4
    if kind == "outlier":
        k[..., 7] *= 12
        v[..., 5] += 9
    cuts = [500, *range(501, 601)]
    exact = feed(make_layer(("turbo", {"compute": "model"}), 1024), q, k, v, cuts)[:, :, 500:]
    int8 = feed(make_layer(("turbo", {}), 1024), q, k, v, cuts)[:, :, 500:]
    full = attention_fp64(q, k, v)[:, :, 500:]
    assert error(int8, exact) < 0.6 * error(exact, full)


def test_tile_scaled_weights_are_worse_than_row_scaled():
    q, k, v = random_qkv(1, 512, dim=64)
    full = attention_fp64(q * 3, k, v)
    row, tile = (
        error(feed(make_layer(("paper_turbo", {"p_scale": s})), q * 3, k, v, [512]), full) for s in ("row", "tile")
    )
    assert row < tile


@pytest.mark.parametrize("p_scale", ["row", "tile"])
@pytest.mark.parametrize("block_q", [32, 64])
def test_rounded_weights_by_hand(p_scale: str, block_q: int):
    """Queries, keys and values have exact codes.

    Weights have 119 levels relative to the largest weight in a block of 64: of the query alone, or of `block_q` queries
    of the head relative to the largest score so far. Row sums add the unrounded weights.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.zeros(1, 2, 128, 16), torch.zeros(1, 1, 128, 16), torch.zeros(1, 1, 128, 16)
    q[..., 0] = torch.randint(20, 119, (1, 2, 128), generator=g) / 119
    q[:, 0, :, 0] *= -1  # to one head the first block is the larger one, to the other the second
    q[:, :, ::32, 0] = torch.tensor([-1.0, 1.0]).view(1, 2, 1)  # the largest code is there in every block
    k[0, 0, :, 0] = (
        4 * torch.cat([torch.randint(-119, 0, (64,), generator=g), torch.randint(1, 119, (64,), generator=g)]) / 119
    )
    k[0, 0, ::64, 0] = torch.tensor([-4.0, 4.0])
    v[..., :64, 0], v[..., 64:, 1] = 1.0, 1.0  # outputs are the blocks' shares
    spec = make_layer(("paper_turbo", {"p_scale": p_scale, "block_q": block_q})).spec
    layer = QAttnLayer(spec, 128)
    handle, _ = layer.update(k, v)
    got, _ = layer.attend(q, handle, torch.tensor([[0, 128]], dtype=torch.int32), Scores(1.0))
    s = (q.double() @ k.double().mT).masked_fill(torch.ones(128, 128).triu(1).bool(), -torch.inf)
    blocks = s.view(1, 2, 128, 2, 64)
    highest = blocks.amax(-1) if p_scale == "row" else blocks.amax(-1).cummax(-1).values
    p = (blocks - highest[..., None].clamp(min=-1e9)).exp()
    top = p.amax(-1)
    if p_scale == "tile":
        top = top.unflatten(2, (-1, block_q)).amax(3).repeat_interleave(block_q, 2)
    step = torch.where(top == 0, 1.0, top)[..., None] / 119
    share = (highest - highest.amax(-1, keepdim=True)).exp()
    want = ((torch.round(p / step) * step).sum(-1) * share) / (p.sum(-1) * share).sum(-1, keepdim=True)
    torch.testing.assert_close(got[..., :2].double(), want, atol=1e-5, rtol=0)


def test_sas_moves_the_output_a_little():
    q, k, v = random_qkv(1, 300)
    q = 3 * q  # peaked, so that weights fall below the cut
    exact, sas = (
        feed(make_layer(("none", {"softmax": s})), q, k, v, [200, *range(201, 301)]) for s in ("exact", "sas")
    )
    whole = feed(make_layer(("none", {"softmax": "sas", "sas_threshold": -1e9})), q, k, v, [200, *range(201, 301)])
    assert error(whole, exact) < 1.04e-3 < error(sas, exact) < 0.1


def test_sparse_v_keeps_its_budget():
    """A sink far above the rest: each skipped weight is small, their sum is not, and the budget bounds the error."""
    q, k, v = random_qkv(1, 500)
    k[:, :, 0] = 3 * q[:, ::2, -1]
    outs = {}
    for tau, budget in ((0.0, 1e-4), (1e-2, 1e-4), (1e-2, math.inf)):
        layer = make_layer(("turbo", {"compute": "model", "sparse_v_tau": tau, "sparse_v_budget": budget}))
        outs[tau, budget] = feed(layer, q, k, v, [499, 500])[:, :, -1]
        assert ("v_skipped" in layer.state and layer.state["v_skipped"].sum() > 0) == (tau > 0)
        if tau > 0:
            assert 0 < layer.state["v_worst"].max() <= budget
    exact, kept, free = outs.values()
    # codes dequantize to a little above the largest value
    assert (kept - exact).abs().max() <= 1e-4 * v.abs().max() * 1.1
    assert (free - exact).abs().max() > 10 * (kept - exact).abs().max()
    off = make_layer(("turbo", {"compute": "model"}))
    assert torch.equal(feed(off, q, k, v, [499, 500])[:, :, -1], exact)


@pytest.mark.parametrize("budget", [math.inf, 0.02])
def test_sparse_v_by_hand(budget: float):
    """Tokens are considered in order.

    A weight below the threshold is skipped if the sum of all skipped weights, including it, stays within the budget.
    """
    q, k, v = random_qkv(1, 200)
    tau = 2e-3
    layer = make_layer(("none", {"sparse_v_tau": tau, "sparse_v_budget": budget}))
    got = feed(layer, q, k, v, [197, 200])[0, :, 197:]
    skipped, dropped, worst = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    for head in range(4):
        for i, at in enumerate(range(197, 200)):
            keys, values = k[0, head // 2, : at + 1].double(), v[0, head // 2, : at + 1].double()
            weights = (keys @ q[0, head, at].double() * 32**-0.5).softmax(-1)
            small, lost, out = 0.0, 0.0, torch.zeros(32, dtype=torch.float64)
            for weight, value in zip(weights.tolist(), values, strict=True):
                small += weight * (weight < tau)
                if weight < tau and small <= budget:
                    lost += weight
                    skipped[head // 2] += 1
                else:
                    out += weight * value
            dropped[head // 2] += lost
            worst[head // 2] = max(float(worst[head // 2]), lost)
            torch.testing.assert_close(got[head, i].double(), out, atol=1e-5, rtol=0)
    skip_counts = skip_counts_of(layer.state)
    assert skip_counts.skipped[0].tolist() == skipped.tolist() and (skipped > 50).all()
    assert skip_counts.read.tolist() == [[2 * (198 + 199 + 200)] * 2] and skip_counts.queries.tolist() == [[6, 6]]
    torch.testing.assert_close(skip_counts.dropped[0].float(), dropped, rtol=1e-4, atol=0)
    torch.testing.assert_close(skip_counts.worst[0], worst, rtol=1e-4, atol=0)


def test_spec_survives_its_text():
    for case in (("turbo", {"bits": "mixed", "k_low_heads": [[1]], "v_low_heads": [[0]]}), ("int8", {}), ("none", {})):
        spec = make_layer(case).spec
        assert decode_spec(spec.encode()) == spec
    assert isinstance(make_layer(("turbo", {})).spec.k, FlashQFormat)


@pytest.mark.parametrize("tokens", [1, 40])
def test_operator_is_registered_rightly(tokens: int):
    """torch's own checks: schema, mutation and the fake implementation that compiled graphs rely on."""
    layer = make_layer(("turbo", {}))
    q, k, v = random_qkv(2, 100)
    feed(layer, q, k, v, [60])
    span = torch.tensor([[0, tokens]], dtype=torch.int32)
    layout = Layout(layer.geometry, layer.spec)
    assert decode_layout(layout.encode(), layout.geometry.batch, layer.blocks) == layout
    assert "\n" not in layout.encode()  # Inductor writes it into comments
    assert columns_seen(layer.arena).data_ptr() == layer.state["columns_seen"].data_ptr()
    args = (q[:, :, 60 : 60 + tokens], k[:, :, 60 : 60 + tokens], v[:, :, 60 : 60 + tokens], span, layer.arena)
    checks = ("test_schema", "test_faketensor")
    args += (layout.encode(), layer.blocks, 0.1, 0.0, 0, None, 1)
    torch.library.opcheck(torch.ops.qattn.attend, args, test_utils=checks)


def test_gradients_fail_loudly():
    layer = make_layer(("none", {}))
    q, k, v = random_qkv(1, 10)
    out = feed(layer, q.requires_grad_(), k, v, [10])
    with pytest.raises(RuntimeError, match=r"autograd|grad"):
        out.sum().backward()


def test_autocast_does_not_reach_the_integer_sums():
    qkv = random_qkv(2, 150, dim=128)
    plain = feed(make_layer(("turbo", {})), *qkv, [140, 150])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(feed(make_layer(("turbo", {})), *qkv, [140, 150]), plain)


def test_a_cache_begun_in_inference_mode_goes_on_outside():
    q, k, v = random_qkv(1, 150)
    layer = make_layer(("turbo", {}), max_cache_len=None)
    with torch.inference_mode():
        feed(layer, q, k, v, [70])
    out = feed(layer, *(x[:, :, 70:] for x in (q, k, v)), [60, 80])
    torch.testing.assert_close(
        out, feed(make_layer(("turbo", {})), q, k, v, [70, 130, 150])[:, :, 70:], atol=1e-5, rtol=0
    )


def test_rows_and_bits_round_trip():
    x = torch.randn(2, 3, 7, 4)
    span = torch.tensor([[2, 5], [0, 3]], dtype=torch.int32)
    back = columns_back(real_first(x, span), span)
    assert torch.equal(back[0, :, 2:], x[0, :, 2:]) and torch.equal(back[1, :, :3], x[1, :, :3])
    assert not back[0, :, :2].any() and not back[1, :, 3:].any()
    flags = torch.rand(3, 5, 64) > 0.5
    assert torch.equal(bits_to_bool(bool_to_bits(flags)), flags)
