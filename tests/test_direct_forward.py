"""`model.forward(...)` in place of `model(...)`, as sentence-transformers calls a model for its embeddings."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from accelerate import cpu_offload
from helpers import random_ids, tiny_llama
from transformers import AutoModel, AutoTokenizer

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.assets import demo_model_dir
from qattn_hf.model._compat import CACHE

pytestmark = pytest.mark.usefixtures("no_grad")
IDS = random_ids(2, 70)
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(60, 70), 0)


@pytest.mark.parametrize("method", ["none", "turbo"])
@pytest.mark.parametrize("part", ["model", "decoder"])
def test_it_is_a_call(part: str, method: str):
    whole = patch(tiny_llama(), method)
    model = whole if part == "model" else whole.get_decoder()
    for arguments in ({}, {"attention_mask": MASK}, {"attention_mask": MASK, "use_cache": False}):
        want, got = model(IDS, **arguments), model.forward(IDS, **arguments)
        assert torch.equal(got[0], want[0]) and list(got) == list(want)
    cache = model.forward(IDS)[CACHE]
    assert isinstance(cache, QAttnCache)
    want = model(IDS[:, :1], **{CACHE: model(IDS)[CACHE]})[0]
    assert torch.equal(model.forward(IDS[:, :1], **{CACHE: cache})[0], want)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), cpu_offload, patch])
def test_of_a_model_that_was_changed_after_patch(change):
    model = patch(tiny_llama(), "none")
    model = change(model) or model
    assert torch.equal(model.forward(IDS, attention_mask=MASK).logits, model(IDS, attention_mask=MASK).logits)


def test_its_signature_stays_and_unpatch_takes_it_off():
    model = tiny_llama()
    signature, want = inspect.signature(model.forward), model.forward(IDS).logits
    patch(model, "int8")
    assert inspect.signature(model.forward) == signature
    unpatch(model)
    assert "forward" not in vars(model) and "forward" not in vars(model.model)
    assert torch.equal(model.forward(IDS).logits, want)


def embeddings(dtype: torch.dtype, method: str | None = None) -> torch.Tensor:
    """Mean over the real tokens of the last hidden states, in fp32, as sentence-transformers computes it."""
    tokenizer, model = AutoTokenizer.from_pretrained(demo_model_dir()), AutoModel.from_pretrained(demo_model_dir())
    model.eval().to(dtype)
    if method is not None:
        patch(model, method)
    texts = ["a b c d e", "hello", "once upon a time there was a small cat"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    hidden = model.forward(**inputs, use_cache=False)[0].float()
    real = inputs["attention_mask"][..., None]
    return (hidden * real).sum(1) / real.sum(1)


def test_padded_embeddings_of_method_none_are_the_stock_models_but_for_rounding():
    """Attention of `none` sums in another order than torch's, so that bf16 rounds elsewhere, as often as torch's."""
    exact = embeddings(torch.float32)
    # 32 times an fp32 step at the values of 2 to 4 that the states have
    torch.testing.assert_close(embeddings(torch.float32, "none"), exact, rtol=0, atol=2.0**-17)
    stock, ours = (embeddings(torch.bfloat16, method) - exact for method in (None, "none"))
    # two draws of the same noise, of 768 numbers: their size differs by a few percent
    assert ours.norm() <= 1.2 * stock.norm()
