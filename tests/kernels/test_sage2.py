"""SageAttention2 on the CPU reference, and the pieces of its kernels in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SAGE1, attention_fp64, feed, make_layer, random_qkv
from pydantic import ValidationError

from qattn_hf import load_recipe
from qattn_hf.methods import get_method
from qattn_kernels.formats.base import Operand, int8_tokens
from qattn_kernels.formats.granularity import key_groups, query_groups
from qattn_kernels.formats.smoothed.reference import tree_sum
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import decode_spec
from qattn_kernels.layer.state import side_of

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def biased(tokens: int = 300) -> Inputs:
    """Queries and keys whose channels have biases, as the paper's Fig. 4 shows them, and values with some."""
    g = torch.Generator().manual_seed(3)
    q, k, v = random_qkv(2, tokens, dim=64)
    for x, size in ((q, 2.0), (k, 4.0), (v, 1.0)):
        x[..., ::7] += size * torch.randn(2, x.shape[1], 1, 10, generator=g)
    return q, k, v


def prefill_error(inputs: Inputs, **settings: Any) -> float:
    exact = attention_fp64(*inputs)
    out = feed(make_layer(("paper_sage2", settings)), *inputs, [inputs[0].shape[2]])
    return ((out - exact).norm() / exact.norm()).item()


def test_finer_scales_err_less():
    inputs = biased()
    found = [prefill_error(inputs, bits=4, granularity=granularity) for granularity in ("token", "thread", "block")]
    assert found == sorted(found)


def test_smoothing_either_helps_and_both_help_most():
    inputs = biased()
    none, k, q, both = (
        prefill_error(inputs, bits=4, smooth_k=smooth_k, smooth_q=smooth_q)
        for smooth_k, smooth_q in ((False, "none"), (True, "none"), (False, "tensor"), (True, "tensor"))
    )
    assert both < min(k, q) and max(k, q) < none
    assert prefill_error(inputs, smooth_v=True) < prefill_error(inputs)


def test_sixteen_bits_err_less_than_fp8_and_e4m3_less_than_e5m2():
    inputs = biased()
    model, e4m3, e5m2 = (prefill_error(inputs, pv=pv) for pv in ("model", "e4m3", "e5m2"))
    assert model < e4m3 < e5m2


def test_groups_are_those_of_a_thread():
    """Keys: four groups a block of 64, of 16 each; queries: eight a segment of 32, of four each."""
    keys, queries = (of("thread", 128, torch.device("cpu")) for of in (key_groups, query_groups))
    assert keys.bincount().tolist() == [16] * 8 and queries.bincount().tolist() == [4] * 32
    assert keys[:10].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    assert queries[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0] and queries[32] == 8


@pytest.mark.parametrize("method", ["sage2", "turbo", "int8"])
def test_log_sum_exp_softcap_and_sinks_are_of_true_scores(method: str):
    """What smoothing subtracted is a constant to a softmax alone. Keys with a large mean would show it missing."""
    q, k, v = random_qkv(1, 130, dim=64)
    k = k + 3.0
    layer = make_layer((method, {"smooth_k": True}))
    scores = Scores(64**-0.5, softcap=20.0, sinks=torch.zeros(4))
    for start, end in ((0, 129), (129, 130)):
        handle, _ = layer.update(k[:, :, start:end], v[:, :, start:end])
        span = torch.tensor([[0, end - start]], dtype=torch.int32)
        _, lse = layer.attend(q[:, :, start:end], handle, span, scores)
    s = 20 * torch.tanh((q[:, :, 129:] @ k.repeat_interleave(2, 1).mT) * 64**-0.5 / 20)
    s = torch.cat([s, torch.zeros(1, 4, 1, 1)], -1)
    assert (lse - s.logsumexp(-1)).abs().max() < 0.1  # scores err by a few hundredths; the mean's share is up to 10


@pytest.mark.parametrize("cuts", [[64], [40, *range(41, 65)]], ids=["prefill", "steps"])
def test_a_mean_is_of_tokens_that_are_not_masked(cuts: list[int]):
    q, k, v = random_qkv(1, 64)
    k = k + 5.0
    others = [t for t in range(64) if t not in (7, 50)]
    mean = k[:, :, others].mean(2)
    k[..., 7, 3] = k[..., 50, 3] = torch.nan
    layer = make_layer(("sage2", {}))
    feed(layer, q, k, v, cuts)
    torch.testing.assert_close(layer.state["k.mean"], mean)


def test_a_prefill_sees_keys_around_the_mean_of_the_row():
    """Blocks that it closes are coded around that one, whatever their own mean is."""
    q, k, v = random_qkv(1, 128)
    layer = make_layer(("turbo", {"smooth_k": True}))
    feed(layer, q, k, v, [64])
    later = int8_tokens((k[:, :, 64:] + 9.0)[:, :, None])
    seen = layer.spec.k.block_form(later, side_of(layer.state, "k"))
    assert seen.mean is not None and torch.equal(seen.mean[:, :, 0, 0], layer.state["k.mean"])


def test_a_sum_by_halves_is_the_sum():
    x = torch.randn(2, 64, 8, dtype=torch.float64)
    torch.testing.assert_close(tree_sum(x), x.sum(-2))


def test_a_mean_counts_as_part_of_the_numbers():
    x = Operand(torch.ones(1, 1, 2, 4, 3), None, torch.full((1, 1, 2, 1, 3), 2.0))
    assert torch.equal(x.dequantize(), torch.full((1, 1, 2, 4, 3), 3.0))
    assert torch.equal(x.map(lambda y: y[:, :, :1]).dequantize(), torch.full((1, 1, 1, 4, 3), 3.0))


def test_a_wrapped_store_survives_as_text():
    spec = get_method("sage2")(bits=4).last_layer_spec(2)
    assert decode_spec(spec.encode()) == spec


def test_sageattention_the_first_is_a_recipe():
    assert load_recipe("sage1").settings.last_layer_spec(2) == get_method("sage2")(**SAGE1).last_layer_spec(2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pv": "model", "v_scale": "prompt"}, ("v_scale='prompt'", "pv='model'")),
        ({"pv": "int8", "smooth_v": True}, ("smooth_v", "pv='int8'")),
        ({"pv": "model", "smooth_v": True}, ("smooth_v", "pv='model'")),
        ({"granularity": "tensor"}, ("granularity='tensor'", "cache='quantized'")),
        ({"cache": "model", "v_scale": "prompt"}, ("v_scale='prompt'", "cache='quantized'")),
    ],
)
def test_settings_that_clash_are_named(settings: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(ValidationError) as error:
        get_method("paper_sage2")(**settings)
    assert all(word in str(error.value) for word in words)
