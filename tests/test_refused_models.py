"""Refused models: each gets one clear message, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import GQA, GREEDY, ONE, SIZES, TOKENS, llava, logits, refused, refused_patch, tiny
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    MllamaForCausalLM,
    PreTrainedModel,
)

from qattn_hf import QAttnCache, patch, release, report, unpatch
from qattn_hf.errors import QAttnError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_grad")


OLD, BOTH = ("attention interface", "use a stock cache"), ("encoder-decoder", "stock")
BIDIRECTIONAL = ("is_causal=False", "is_decoder=True", "use it as it is")
INDEXED = ("indexer chooses", "stock cache")
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt_neo": ({"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}, OLD),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, OLD),
    "t5": ({"d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 2, "num_heads": 2}, BOTH),
    "bart": ({"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}, BOTH),
}
ENCODERS = [
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
]  # fmt: skip
ODD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mllama_text_model": ({"num_hidden_layers": 4}, ("cross attention", "stock cache")),
    "dots3_note_text": ({"num_hidden_layers": 2, "layer_types": ["indexed_attention", "sliding_attention"]}, INDEXED),
    "blt": ({}, ("several stacks of layers", "stock cache")),
    "xlstm": ({"num_hidden_layers": 2}, ("no attention", "nothing to pack")),
}
TOUCHES_KEYS: dict[str, dict[str, Any]] = {
    "diffllama": GQA,
    "doge": GQA,
    "jetmoe": {**GQA, "kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", MODELS)
def test_models(family):
    sizes, parts = MODELS[family]
    model = tiny(family, AutoModelForSeq2SeqLM if "encoder-decoder" in parts else AutoModelForCausalLM, **sizes)
    refused_patch(model, UnsupportedError, family, *parts)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family):
    """Their attention would turn causal: a packed cache cannot see what comes later."""
    model = tiny(family, **SIZES, embedding_size=32, default_language="en_XX")
    refused_patch(model, UnsupportedError, family, *BIDIRECTIONAL)


@pytest.mark.parametrize("family", ["bert", "electra", "xlm-roberta"])
def test_encoders_trained_as_decoders_stay(family):
    model = tiny(family, **SIZES, embedding_size=32, is_decoder=True)
    want, text = logits(model), model.generate(ONE, **GREEDY)
    patch(model, "none")
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)
    assert torch.equal(model.generate(ONE, **GREEDY), text)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_attention_that_turns_bidirectional_after_patch(patched, tokens):
    patched.model.layers[1].self_attn.is_causal = False
    refused(lambda: patched(ONE[:, :tokens]), UnsupportedError, "not causal", "unpatch(model)")


@pytest.mark.parametrize("family", ["bart", "marian", "mbart"])
def test_decoders_of_encoder_decoders_are_packed(family):
    """They make a mask for cross attention that nobody reads."""
    sizes = dict(d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32, pad_token_id=0)
    alike = dict(encoder_layers=2, encoder_attention_heads=2)
    refused_patch(
        tiny(family, **sizes, **{**alike, "encoder_layers": 3}), UnsupportedError, "encoder_layers=3", "has 2"
    )
    model = tiny(family, **sizes, **alike)
    want, text = logits(model), model.generate(ONE, **GREEDY)
    patch(model, "none")
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)
    assert torch.equal(model.generate(ONE, **GREEDY), text)


@pytest.mark.parametrize("family", ODD)
def test_models_that_are_built_otherwise(family):
    """Refused before anything is computed, so without weights."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    sizes, parts = ODD[family]
    build = MllamaForCausalLM if family.startswith("mllama") else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(AutoConfig.for_model(family, **sizes))
    refused(lambda: patch(model), UnsupportedError, family, *parts)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), None, "gpt2", DynamicCache()], ids=lambda x: type(x).__name__)
def test_what_is_no_model(thing):
    refused(lambda: patch(thing), UnsupportedError, "a transformers model", type(thing).__name__)
    refused(lambda: unpatch(thing), QAttnError, "not patched")
    refused(lambda: report(thing), QAttnError, "patched model", type(thing).__name__)


def test_report_and_unpatch_of_a_stock_model(stock):
    refused(lambda: unpatch(stock), QAttnError, "not patched")
    refused(lambda: release(stock), QAttnError, "not patched")
    refused(lambda: report(stock), QAttnError, "patched model or a QAttnCache", "LlamaForCausalLM")


@pytest.mark.parametrize("name", ["forward", "_prepare_cache_for_generation", "get_compiled_call"])
def test_model_patched_by_other_means(stock, name):
    owner = stock.model.layers[1].self_attn if name == "forward" else stock
    setattr(owner, name, getattr(owner, name))
    refused_patch(stock, UnsupportedError, "already patched by other means", name, "undo that")
    delattr(owner, name)
    assert patch(stock) is stock


@pytest.mark.parametrize("when", ["before", "after"])
def test_fused_parts_outside_of_attention_are_kept(stock, when):
    """What Liger-Kernel and kernels of the hub do: other forwards on norms and MLPs, on instances or on the class."""
    fused = [stock.model.norm, stock.model.layers[0].input_layernorm, stock.model.layers[1].mlp]
    want, called = logits(stock), []
    if when == "after":
        patch(stock, "none", impl="reference")
    for part in fused:
        part.forward = lambda x, part=part: called.append(part) or type(part).forward(part, x)
    if when == "before":
        patch(stock, "none", impl="reference")
    torch.testing.assert_close(logits(stock), want, rtol=0, atol=1e-5)  # fp32, sums in another order
    assert {id(part) for part in called} == {id(part) for part in fused}
    patch(stock, "int8")  # again, over the first patch
    unpatch(stock)
    called.clear()
    assert torch.equal(logits(stock), want) and len(called) == 3


def test_wrapper_of_adapters_names_the_model_inside(stock):
    wrapper = torch.nn.Module()
    wrapper.get_base_model = lambda: stock
    refused(lambda: patch(wrapper), UnsupportedError, r"patch(model.get_base_model())")


def test_patched_model_patched_by_other_means(patched):
    owner = patched.model.layers[1].self_attn
    owner.forward = owner.forward
    refused_patch(patched, UnsupportedError, "already patched by other means", "layers.1.self_attn.forward")


@pytest.mark.parametrize("count", [1, TOKENS])
@pytest.mark.parametrize("family", TOUCHES_KEYS)
def test_models_that_touch_keys_fail_closed(family, count):
    model = tiny(family, **TOUCHES_KEYS[family])
    want = logits(model)
    patch(model)
    refused(lambda: model(ONE[:, :count]), UnsupportedError, "packed")
    refused(lambda: model.generate(ONE[:, :count], **GREEDY), UnsupportedError, "packed")
    assert report(model).to_dict()["packed_tokens"] == report(model).to_dict()["open_tokens"] == 0
    assert torch.equal(logits(unpatch(model)), want)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_our_cache_on_an_unpatched_model(attn):
    model = tiny(attn_implementation=attn)
    want, cache = logits(model), QAttnCache.for_model(model, "turbo")
    refused(lambda: model(ONE, past_key_values=cache), UnsupportedError, "qattn_hf.patch")
    refused(lambda: model.generate(ONE, past_key_values=cache, **GREEDY), UnsupportedError, "qattn_hf.patch")
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(logits(model), want)


# Models and their decoders; only one of the two can be patched

WRAPPED: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, ...]]] = {
    "causal": (tiny, ("model",)),
    "vision": (llava, ("model", "model.language_model")),
}
OVER = {"method": "sage2", "cache": "model"}


@pytest.mark.parametrize("how", [{}, OVER], ids=["packed", "over"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_decoder_inside_a_patched_model(kind, how):
    build, inner = WRAPPED[kind]
    model = build()
    want = logits(model)
    patch(model, **how)
    packed = logits(model)
    for name in inner:
        for call in (patch, unpatch, release):
            refused(lambda: call(model.get_submodule(name)), UnsupportedError, "part of a larger model that is patched")  # noqa: B023
    assert str(report(model.get_decoder())) == str(report(model))
    assert torch.equal(logits(model), packed)
    assert torch.equal(logits(unpatch(model)), want)


@pytest.mark.parametrize("how", [{}, OVER], ids=["packed", "over"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_model_around_a_patched_decoder(kind, how):
    build, inner = WRAPPED[kind]
    model = build()
    want = logits(model)
    for name in inner:
        decoder = patch(model.get_submodule(name), **how)
        packed = logits(model)
        for call in (patch, unpatch, release):
            refused(lambda: call(model), UnsupportedError, "patched by itself", f"unpatch(model.{name})")  # noqa: B023
        assert torch.equal(logits(model), packed) and not torch.equal(packed, want)
        unpatch(decoder)
        assert torch.equal(logits(model), want)
    assert torch.equal(logits(patch(model, **how)), packed)
    assert torch.equal(logits(unpatch(model)), want), "the decoder has another config after it was patched"
