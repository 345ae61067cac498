"""Refused calls: each gets one clear message, and the model and its cache are unchanged."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import (
    GREEDY,
    IDS,
    LONGER,
    ONE,
    TOKENS,
    llava,
    logits,
    refused,
    same,
    state,
    tiny,
)
from transformers import DynamicCache

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.errors import CapacityError, QAttnError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_grad")


def ones(count: int, *zeros: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.long).index_fill(1, torch.tensor(zeros, dtype=torch.long), 0)


RESTART = torch.cat([torch.arange(40), torch.arange(TOKENS - 40)])[None]
CAUSAL = torch.ones(1, 1, TOKENS, TOKENS).tril()
OWN = ("DynamicCache", "QAttnCache.for_model(model)")
HIDDEN = ("row 0", "real tokens of the cache", "fresh cache")
ATTENTIONS = ("output_attentions", "unpatch(model)")
FORWARD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"past_key_values": DynamicCache()}, OWN),
    ({"past_key_values": ()}, ("tuple", OWN[1])),
    ({"output_attentions": True}, ATTENTIONS),
    ({"attention_mask": ones(TOKENS, 9)}, ("row 0", "zeros between real tokens", "on the left")),
    ({"attention_mask": CAUSAL.bool()}, ("custom attention mask", "2-D attention_mask")),
    ({"attention_mask": CAUSAL[0]}, ("mask", "2-D attention_mask")),
    ({"attention_mask": ones(TOKENS - 1)}, (f"{TOKENS - 1} columns", f"must have {TOKENS}")),
    ({"attention_mask": ones(TOKENS + 1)}, (f"{TOKENS + 1} columns", f"must have {TOKENS}")),
    ({"position_ids": RESTART}, ("packed sequences", "one row a sequence")),
    ({"is_causal": False}, ("causal", "not supported")),
    ({"cu_seq_lens_q": torch.tensor([0, 40, TOKENS])}, ("packed sequences", "not supported")),
]
GENERATE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"past_key_values": DynamicCache()}, OWN),
    ({"cache_implementation": "static"}, ("cache_implementation='static'", "leave it out", "unpatch(model)")),
    ({"output_attentions": True, "return_dict_in_generate": True}, ATTENTIONS),
    ({"attention_mask": ones(TOKENS, 9)}, ("row 0", "zeros between real tokens", "on the left")),
    ({"attention_mask": ones(TOKENS, TOKENS - 1)}, ("on the left",)),
    ({"attention_mask": ones(TOKENS, *range(TOKENS))}, ("row 0", "no real token", "leave that row out")),
]


def named(x: Any) -> str:
    return "-".join(f"{k}={getattr(v, 'shape', v)}" for k, v in x.items()) if isinstance(x, dict) else ""


@pytest.mark.parametrize(("how", "parts"), FORWARD, ids=named)
def test_forward(patched, how, parts):
    want, foreign = logits(patched), copy.deepcopy(how.get("past_key_values"))
    if foreign is not None:
        how = {**how, "past_key_values": foreign}
    refused(lambda: patched(ONE, **how), UnsupportedError, *parts)
    if isinstance(foreign, DynamicCache):
        assert foreign.get_seq_length() == 0
    assert torch.equal(logits(patched), want)


@pytest.mark.parametrize(("how", "parts"), GENERATE, ids=named)
def test_generate(patched, how, parts):
    want = patched.generate(ONE, **GREEDY)
    refused(lambda: patched.generate(ONE, **how, **GREEDY), UnsupportedError, *parts)
    assert torch.equal(patched.generate(ONE, **GREEDY), want)


def test_mask_of_four_dimensions_in_generate(patched):
    """Here transformers itself is first, in some versions."""
    with pytest.raises(ValueError, match=r"2D|2-D"):
        patched.generate(ONE, attention_mask=CAUSAL.bool(), **GREEDY)


@pytest.mark.parametrize("at", [(9,), (TOKENS - 1,), range(TOKENS)], ids=["inside", "last", "all"])
def test_pad_tokens_that_generate_takes_for_padding(patched, at):
    """The user gave no mask, so the message says where it comes from; the way out that it names is one."""
    ids = ONE.index_fill(1, torch.tensor(list(at)), 0)
    parts = "token 0 (pad_token_id)", "If you passed no mask", "attention_mask=torch.ones_like(input_ids)"
    refused(lambda: patched.generate(ids, **GREEDY), UnsupportedError, *parts)
    got = patched.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert got[0, TOKENS] == patched(ids).logits[0, -1].argmax()
    if len(at) == 1:
        mask = torch.ones_like(ids).index_fill(1, torch.tensor(list(at)), 0)
        with pytest.raises(UnsupportedError) as caught:
            patched.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=0, **GREEDY)
        assert "pad_token_id" not in str(caught.value), "a token that ends texts is never taken for padding"


OVER = {"method": "sage2", "cache": "model"}


@pytest.mark.parametrize("how", [{}, OVER], ids=["packed", "over"])
@pytest.mark.parametrize("build", [tiny, llava])
def test_other_attention_chosen_after_patch(build, how):
    model = build()
    want = logits(model)
    packed = logits(patch(model, **how))
    for call in (lambda: model(ONE), lambda: model.get_decoder()(ONE), lambda: model.generate(ONE, **GREEDY)):
        model.set_attn_implementation("eager")
        refused(call, UnsupportedError, "set_attn_implementation chose 'eager'", "patch the model again", "unpatch")
        assert torch.equal(logits(patch(model, **how)), packed)
    assert torch.equal(logits(unpatch(model)), want)


@pytest.mark.product("over-False")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", [{}, {"method": "none"}, OVER], ids=["turbo", "none", "over"])
def test_backward_through_a_patched_model(how, compiled):
    model = patch(tiny(), **how)
    start = 0 if how == OVER else 20  # a compiled call needs a packed cache that was written to, and has room
    caches = [model(ONE[:, :start]).past_key_values if start else None for _ in range(2)]
    new = ONE[:, start:60]
    want = model(new, past_key_values=caches[0]).logits
    with torch.enable_grad():
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        got = call(new, past_key_values=caches[1]).logits
        assert torch.equal(got, want)
        refused(got.sum().backward, UnsupportedError, "has no gradient", "model.train()", "torch.no_grad()")


def test_config_that_asks_for_it():
    model, parts = tiny(attn_implementation="eager", output_attentions=True), ("output_attentions", "unpatch(model)")
    want = logits(model)
    patch(model)
    refused(lambda: model(ONE), UnsupportedError, *parts)
    refused(lambda: model.generate(ONE, **GREEDY), UnsupportedError, *parts)
    assert torch.equal(logits(unpatch(model)), want)


def test_overflow_of_a_fixed_capacity(patched):
    cache = QAttnCache.for_model(patched, max_cache_len=TOKENS)
    spare = cache.layers[0].capacity - TOKENS
    patched(ONE, past_key_values=cache)
    before = state(cache)
    parts = "nothing was written", "max_cache_len"
    refused(lambda: patched(ONE[:, : spare + 1], past_key_values=cache), CapacityError, *parts)
    assert same(before, cache)
    grows = patched(ONE).past_key_values
    got, want = (patched(ONE[:, :spare], past_key_values=c).logits for c in (cache, grows))
    assert torch.equal(got, want)
    refused(lambda: patched(ONE[:, :1], past_key_values=cache), CapacityError, "nothing was written")


def test_overflow_at_once(patched):
    cache = QAttnCache.for_model(patched, max_cache_len=64)
    refused(lambda: patched(ONE, past_key_values=cache), CapacityError, "holds 64 tokens", "nothing was")
    for count in (TOKENS, 63):  # a prompt that does not fit, and one that leaves too little room
        call = functools.partial(patched.generate, ONE[:, :count], past_key_values=cache, **GREEDY)
        refused(call, CapacityError, "holds 64 tokens", "nothing was")
        assert int(cache.get_seq_length()) == 0
    fits = ONE[:, :62]  # the last answer token is never written
    assert torch.equal(patched.generate(fits, past_key_values=cache, **GREEDY), patched.generate(fits, **GREEDY))


@pytest.mark.parametrize("length", [0, -1, "70"])
def test_lengths_that_are_none(patched, length):
    refused(lambda: QAttnCache.for_model(patched, max_cache_len=length), QAttnError, "max_cache_len", str(length))


# fmt: off
BAD_TURNS: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], tuple[str, ...]]] = {
    "batch": (lambda m, c: m(IDS[:, :2], **c), ("1 rows", "the call has 2", "batch_repeat_interleave")),
    "batch in generate": (lambda m, c: m.generate(LONGER, **c, **GREEDY), ("1 rows", "the call has 2")),
    "mask without the past": (
        lambda m, c: m(ONE[:, :2], attention_mask=ones(2), **c),
        (f"holds {TOKENS} and 2 are new", f"must have {TOKENS + 2}"),
    ),
    "hole": (lambda m, c: m(ONE[:, :2], attention_mask=ones(TOKENS + 2, TOKENS), **c), ("zeros between", "the left")),
    "hidden": (lambda m, c: m(ONE[:, :2], attention_mask=ones(TOKENS + 2, *range(9)), **c), HIDDEN),
    "hidden at a step": (lambda m, c: m(ONE[:, :1], attention_mask=ones(TOKENS + 1, 0), **c), HIDDEN),
    "hidden in generate": (
        lambda m, c: m.generate(LONGER[:1], attention_mask=ones(TOKENS + 2, *range(9)), **c, **GREEDY),
        HIDDEN,
    ),
    "drafts": (
        lambda m, c: m.generate(LONGER[:1], prompt_lookup_num_tokens=3, **c, **GREEDY),
        ("reads the whole prompt again", "prompt_lookup_num_tokens"),
    ),
    "own mask": (lambda m, c: m(ONE[:, :1], attention_mask=CAUSAL[:, :, -1:].bool(), **c), ("custom attention mask",)),
    "output_attentions": (lambda m, c: m(ONE[:, :1], output_attentions=True, **c), ATTENTIONS),
    "stock attention": (lambda m, c: tiny()(ONE[:, :1], **c), ("qattn_hf.patch",)),
}
# fmt: on


@pytest.mark.parametrize("turn", BAD_TURNS)
def test_refused_turn_leaves_the_cache(patched, turn):
    cache, split_int8 = (patched(ONE).past_key_values for _ in range(2))
    before, (call, parts) = state(cache), BAD_TURNS[turn]
    refused(lambda: call(patched, {"past_key_values": cache}), UnsupportedError, *parts)
    assert same(before, cache)
    got, want = (patched(ONE[:, :5], past_key_values=c).logits for c in (cache, split_int8))
    assert torch.equal(got, want)


def test_another_device_type(patched):
    cache = QAttnCache.for_model(patched)
    for layer in cache.layers:
        layer.device_type = "cuda"
    parts = "patched for cuda", "runs on cpu", "patch it again"
    refused(lambda: patched(ONE, past_key_values=cache), UnsupportedError, *parts)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_cache_of_a_model_with_other_layers(patched, layers):
    cache = QAttnCache.for_model(tiny(num_hidden_layers=layers), "turbo")
    parts = f"{layers} layers", "QAttnCache.for_model(model)"
    refused(lambda: patched(ONE, past_key_values=cache), UnsupportedError, *parts)
    assert not cache.state_tensors()


def test_crop_into_padded_columns(patched):
    cache = patched(IDS, attention_mask=torch.cat([ones(TOKENS, 0, 1), ones(TOKENS)])).past_key_values
    for _ in range(3):
        patched(IDS[:, :1], past_key_values=cache)
    before, most = state(cache), TOKENS + 1
    refused(lambda: cache.crop(-most - 1), UnsupportedError, f"cannot crop {most + 1} columns", "padding", "Crop less")
    assert same(before, cache)
    cache.crop(-most)
    assert int(cache.get_seq_length()) == 2


@pytest.mark.parametrize("name", ["keys", "values"])
def test_reading_or_replacing_the_tokens_of_a_layer(patched, name):
    """As presses of kvpress do in a hook: what they put there would be kept and never read."""
    layer = patched(ONE).past_key_values.layers[0]
    refused(lambda: getattr(layer, name), UnsupportedError, "codes", "kvpress", "unpatch(model)")
    refused(lambda: setattr(layer, name, torch.zeros(1)), UnsupportedError, "codes", "unpatch(model)")
