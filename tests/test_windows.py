"""Sliding windows that show all positions are none: their layers are packed, and served as far as they reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import GQA, ONE, refused
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from qattn_hf import QAttnCache, patch, report, unpatch
from qattn_hf.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("no_grad")

WINDOW = 90  # not a multiple of a block, and smaller than a cache with this number of tokens
SIZES: dict[str, Any] = {**GQA, "sliding_window": WINDOW, "max_position_embeddings": WINDOW}
# what the config of a type needs to have a window, in all layers or in some
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "phi3": {},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "olmo3": {"num_hidden_layers": 4},
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
OVER = {"method": "sage2", "cache": "model"}
IDS = torch.cat([ONE, ONE.flip(1)], 1)
GREEDY = {"do_sample": False}
BEYOND = (f"sliding window of {WINDOW}", "nothing was written", "unpatch(model)")


def tiny(family: str = "mistral", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def turns(model: PreTrainedModel, cache: Any = None) -> torch.Tensor:
    """Return the logits of a prompt and of later single steps, up to the last token in the window."""
    out = model(IDS[:, : WINDOW - 3], past_key_values=cache)
    steps = [model(IDS[:, i : i + 1], past_key_values=out.past_key_values) for i in range(WINDOW - 3, WINDOW)]
    return torch.cat([x.logits for x in (out, *steps)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_window_over_all_positions_is_served(family):
    model = tiny(family)
    want, text = turns(model), model.generate(IDS[:, :80], max_new_tokens=10, **GREEDY)
    patch(model, "none")
    torch.testing.assert_close(turns(model), want, rtol=0, atol=1e-5)
    assert torch.equal(model.generate(IDS[:, :80], max_new_tokens=10, **GREEDY), text)
    turns(patch(model, "turbo"))
    assert report(model).to_dict()["packed_tokens"] == 64
    assert torch.equal(turns(unpatch(model)), want)


def test_positions_are_what_counts():
    assert tiny(sliding_window=2048, max_position_embeddings=2048).config.sliding_window == 2048
    patch(tiny(sliding_window=2048, max_position_embeddings=1024))  # as Phi-4-mini, Phi-3-mini-128k
    with pytest.warns(UserWarning, match="nothing is packed.*sliding window of 2047"):
        patch(tiny(sliding_window=2047, max_position_embeddings=2048))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_beyond_the_window_are_refused_before_anything_is_written(family):
    model = patch(tiny(family), "turbo")
    cache, split_int8 = (model(IDS[:, : WINDOW - 1]).past_key_values for _ in range(2))
    for call in (
        lambda: model(IDS[:, : WINDOW + 1]),
        lambda: model(IDS[:, WINDOW - 1 : WINDOW + 1], past_key_values=cache),
        lambda: model.generate(IDS[:, :80], max_new_tokens=12, **GREEDY),
        lambda: model.generate(IDS[:, :WINDOW], past_key_values=cache, max_new_tokens=2, **GREEDY),
        lambda: model.generate(IDS[:, :80], max_new_tokens=11, prompt_lookup_num_tokens=2, **GREEDY),
    ):
        refused(call, UnsupportedError, *BEYOND)
        assert int(cache.get_seq_length()) == WINDOW - 1
    last = IDS[:, WINDOW - 1 : WINDOW]
    got, want = (model(last, past_key_values=c).logits for c in (cache, split_int8))
    assert torch.equal(got, want)
    refused(lambda: model(last, past_key_values=cache), UnsupportedError, *BEYOND)


def test_generate_reaches_to_the_last_token_of_the_window():
    """The last new token is never written, and so is one more than the window shows."""
    model = tiny()
    want = model.generate(IDS[:, :80], max_new_tokens=11, **GREEDY)
    assert want.shape[1] == WINDOW + 1
    assert torch.equal(patch(model, "none").generate(IDS[:, :80], max_new_tokens=11, **GREEDY), want)


def test_compiled_calls_within_the_window():
    """They cannot ask how many tokens there are, so a cache that could hold more is refused."""
    model = patch(tiny(), "turbo")
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    fits, larger = (QAttnCache.for_model(model, max_cache_len=n) for n in (64, WINDOW))
    for cache in (fits, larger):
        model(IDS[:, :60], past_key_values=cache)
    want = model(IDS[:, :61]).logits[:, -1]
    torch.testing.assert_close(call(IDS[:, 60:61], past_key_values=fits).logits[:, -1], want, rtol=0, atol=0.1)
    with pytest.raises(Exception, match=f"sliding window of {WINDOW} tokens: its cache holds 128"):
        call(IDS[:, 60:61], past_key_values=larger)
    assert int(larger.get_seq_length()) == 60


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_over_transformers_own_caches(family, kind):
    model = tiny(family)

    def cache(length: int) -> Any:
        return kind(config=model.config, **({"max_cache_len": length} if kind is StaticCache else {}))

    want = turns(model, cache(WINDOW))
    patch(model, **OVER)
    used = cache(WINDOW + 10)
    got = turns(model, used)
    error = float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())
    assert 1e-4 < error < 0.2
    refused(lambda: model(IDS[:, :1], past_key_values=used), UnsupportedError, *BEYOND)
    assert int(used.get_seq_length()) == WINDOW
    refused(lambda: model(IDS[:, : WINDOW + 1]), UnsupportedError, *BEYOND)
    fresh = cache(WINDOW + 10)
    refused(lambda: model.generate(IDS[:, :80], past_key_values=fresh, max_new_tokens=12), UnsupportedError, *BEYOND)
    assert int(fresh.get_seq_length()) == 0
    assert model.generate(IDS[:, :80], past_key_values=fresh, max_new_tokens=11, **GREEDY).shape[1] == WINDOW + 1


def test_learned_sinks_take_part():
    """gpt-oss gives each query head a logit without a token. It works if no layer has a window."""
    experts = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    kinds = ["full_attention"] * GQA["num_hidden_layers"]
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **GQA, **experts, rope_parameters=rope, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.normal_()
    want = model(IDS).logits
    assert (patch(model, "none:family=false")(IDS).logits - want).abs().max() < 1e-5  # sums of fp32 in another order
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert (model(IDS).logits - want).abs().max() > 1e-3
