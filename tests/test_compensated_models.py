"""`compensate_k` in models: where the second moment of queries comes from, and that it stays with every cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from small_types import PACKED, tiny
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, QAttnError, RecipeError, UnsupportedError, patch, release, unpatch
from qattn_hf.attention.model_constants import compensation
from qattn_hf.recipes.recipe import find_recipe

pytestmark = pytest.mark.usefixtures("no_grad")

METHOD: dict[str, Any] = {"method": "kivi", "group_size": 64, "residual_length": 0, "compensate_k": True}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def model_of(**changes: Any) -> PreTrainedModel:
    """One whose queries are far from alike in all directions."""
    return tiny_llama(initializer_range=0.3, **changes)


def held(cache: QAttnCache) -> list[torch.Tensor]:
    return [layer.state["k.compensation"] for layer in cache.packed]


def test_moments_are_those_of_the_queries_that_meet_a_head():
    """Against the projection and the rotary embedding by hand, of the first layer."""
    model = model_of()
    specs = find_recipe(None, None, {}).layer_specs(model.config)
    found = compensation.second_moments(model, {0: specs[0]}, {})
    inputs, inner = compensation.probe(model), model.model
    layer = inner.layers[0]
    hidden = layer.input_layernorm(inner.embed_tokens(inputs["input_ids"]))
    query = layer.self_attn.q_proj(hidden).unflatten(-1, (4, 16)).transpose(1, 2)
    cos, sin = (x[:, None] for x in inner.rotary_emb(hidden, inputs["position_ids"]))
    turned = torch.cat([-query[..., 8:], query[..., :8]], -1)
    heads = (query * cos + turned * sin)[0].unflatten(0, (2, 2)).flatten(1, 2)
    torch.testing.assert_close(found[0], heads.mT @ heads / heads.shape[1])


def test_positions_are_spread_over_all_that_the_model_knows():
    few, many = (compensation.probe(tiny_llama(max_position_embeddings=n)) for n in (100, 131072))
    assert few["position_ids"][0].tolist() == list(range(100))
    at = many["position_ids"][0]
    assert len(at) == compensation.TOKENS and at[-1] == compensation.FARTHEST - 16 and set(at.diff().tolist()) == {16}


def test_a_pass_leaves_the_model_as_it_was():
    model, ids = model_of(), random_ids(1, 80)
    before, config = model(ids).logits, copy.deepcopy(model.config)
    patch(model, **METHOD)
    unpatch(model)
    assert torch.equal(model(ids).logits, before) and model.config.to_dict() == config.to_dict()


def test_every_cache_of_a_model_has_its_shares():
    """Caches: the first, the next in the same memory, a second one at the same time, copies, and a reset one."""
    model, ids = patch(model_of(), **METHOD), random_ids(2, 150)
    want = [constants["k.compensation"] for constants in model._qattn.constants]
    assert all(x.any() for x in want) and not torch.equal(*want)
    first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    caches = [first.past_key_values, copy.deepcopy(first.past_key_values)]
    again = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(first.sequences, again.sequences)
    own = QAttnCache.for_model(model_of(), **METHOD)  # of a model that is not patched
    model(ids, past_key_values=(beside := QAttnCache.for_model(model)))
    emptied = QAttnCache.for_model(model)
    model(ids, past_key_values=emptied)
    emptied.reset()
    caches += [again.past_key_values, beside, emptied]
    assert all(torch.equal(x, y) for cache in caches for x, y in zip(held(cache), want, strict=True))
    assert all(torch.equal(layer.constants["k.compensation"], y) for layer, y in zip(own.packed, want, strict=True))
    release(model)


def test_rows_beams_and_blocks_keep_the_shares():
    model, ids = patch(model_of(), **METHOD), random_ids(2, 100)
    cache = model(ids).past_key_values
    want = [x.clone() for x in held(cache)]
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices([0, 3])
    cache.crop(-30)
    cache.raise_horizon(100)
    model(random_ids(2, 200), past_key_values=cache)
    assert all(torch.equal(x, y) for x, y in zip(held(cache), want, strict=True))


def test_a_saved_prefix_goes_on_and_is_emptied_with_its_shares(tmp_path: Path):
    model, ids = patch(model_of(), **METHOD), random_ids(1, 150)
    cache = model(ids).past_key_values
    want = [x.clone() for x in held(cache)]
    cache.save(tmp_path / "prefix.safetensors")
    loaded = QAttnCache.load(tmp_path / "prefix.safetensors", model)
    more = random_ids(1, 90, seed=2)
    outs = [model(more, past_key_values=one).logits for one in (cache, loaded)]
    assert torch.equal(*outs)
    loaded.reset()
    assert all(torch.equal(x, y) for x, y in zip(held(loaded), want, strict=True))


@pytest.mark.product
@pytest.mark.parametrize("model_type", [*(name for name in PACKED if name != "deepseek_v3"), "whisper"])
def test_layers_of_every_kind_have_shares(model_type: str):
    """Models with windows, an SSM, shared keys and values, and learned positions."""
    model = patch(tiny(model_type), **METHOD, sliding="packed")
    cache = model(random_ids(1, 70)).past_key_values
    assert cache.packed and all(x.any() for x in held(cache))


def test_the_codes_are_those_of_the_shares():
    """Without them, or with another model's, the same tokens get others."""
    codes = []
    for shift in (0.0, 1.0, None):
        model = patch(model_of(), **{**METHOD, "compensate_k": shift is not None})
        for constants in model._qattn.constants if shift else []:
            constants["k.compensation"].mul_(-shift)
        codes.append(model(random_ids(1, 128)).past_key_values.packed[0].state["k.codes"].clone())
    assert not torch.equal(codes[0], codes[1]) and not torch.equal(codes[0], codes[2])


def test_what_cannot_be_compensated_is_refused(monkeypatch: pytest.MonkeyPatch):
    """And an earlier patch stays."""
    with pytest.raises(RecipeError, match="compensation between"):
        patch(tiny("deepseek_v3"), **METHOD)
    bare = patch(model_of(), **METHOD)
    with pytest.raises(UnsupportedError, match="made without a model"):
        bare(random_ids(1, 5), past_key_values=QAttnCache(bare._qattn.specs, bare._qattn.recipe))
    patched = patch(model_of(), "turbo")
    with pytest.raises(QAttnError, match="unpatch"):
        QAttnCache.for_model(patched, **METHOD)
    before = patched(random_ids(1, 70)).logits
    monkeypatch.setattr(compensation, "second_moments", lambda *args: {})
    with pytest.raises(UnsupportedError, match="layer 0 receives no queries"):
        patch(patched, **METHOD)
    assert patched._qattn.recipe.method == "turbo" and torch.equal(patched(random_ids(1, 70)).logits, before)
