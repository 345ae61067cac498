"""`equalize_k`: channels are equalized before keys are rotated, which products do not notice and codes do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import attention_fp64, feed, make_layer, random_ids, random_qkv, tiny_llama
from small_types import tiny
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, RecipeError, UnsupportedError, patch, release
from qattn_hf.attention.model_constants.equalizer import FIRST, LARGEST, equalizer
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.state import side_of
from qattn_kernels.ops.rotate.reference import rotate

pytestmark = pytest.mark.usefixtures("no_grad")

SETTINGS = {"group_size": 64, "residual_length": 0, "rotate_k": "hadamard", "equalize_k": True}


def model_of() -> PreTrainedModel:
    """One whose key channels are far from alike."""
    model = tiny_llama(initializer_range=0.3)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight[3::8].mul_(20)
    return model


def held(cache: QAttnCache) -> list[torch.Tensor]:
    return [layer.state["k.equalizer"] for layer in cache.packed]


def test_products_stay_as_they_are():
    """Of tokens that no block has packed yet: what is left are roundings of fp32."""
    q, k, v = random_qkv(2, 20)
    layer = make_layer(("kivi", {"rotate_k": "hadamard", "equalize_k": True}))
    out = feed(layer, q, k, v, [15, 16, 20])
    assert (layer.state["k.equalizer"].log2().abs() > 0.5).any()
    torch.testing.assert_close(out, attention_fp64(q, k, v).float(), atol=1e-5, rtol=0)


def test_what_is_packed_is_equalized_and_then_rotated():
    q, k, v = random_qkv(1, 64)
    layer = make_layer(("kivi", {"bits": 4, **SETTINGS}))
    feed(layer, q, k, v, [64])
    packed = layer.spec.k.read(side_of(layer.state, "k"), 1).dequantize().flatten(2, 3)
    wanted = rotate(k, layer.state["k.equalizer"][0])
    steps = (wanted.amax(2, keepdim=True) - wanted.amin(2, keepdim=True)) / 15
    assert bool(((packed - wanted).abs() <= 0.51 * steps).all())  # half a step, and fp16 scales
    assert (packed - rotate(k)).norm() > 2 * (packed - wanted).norm()


def test_scales_make_keys_and_queries_alike():
    """With the factors once more, where none hits the limits, both have one size up to a factor of the head. Zeros stay
    as they are."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(4, 90, 16, generator=generator), torch.randn(2, 90, 16, generator=generator)
    keys[:, :, 3] *= 40
    keys[:, :FIRST] *= 1000  # the first tokens do not count
    of_keys, of_queries = equalizer(query, keys)
    torch.testing.assert_close(of_keys * of_queries, torch.ones(2, 16))
    torch.testing.assert_close(of_keys.log().mean(-1), torch.zeros(2), atol=1e-5, rtol=0)
    k = (keys[:, FIRST:] * of_keys[:, None] ** 2).square().mean(1)  # twice the factors would make them alike
    q = (query[:, FIRST:].unflatten(0, (2, 2)).flatten(1, 2) * of_queries[:, None] ** 2).square().mean(1)
    torch.testing.assert_close(k / q, (k / q)[:, :1].expand(-1, 16))
    keys[:, :, 5] = 0
    keys[:, :, 3] *= 1e12
    of_keys, _ = equalizer(query, keys)
    assert bool((of_keys[:, 5] == 1).all()) and bool((of_keys[:, 3] == 1 / LARGEST).all())
    assert bool((equalizer(query * 0, keys * 0) == 1).all())


def test_codes_err_less_where_a_channel_stands_out():
    """Of the outputs of a prompt's last tokens, which read keys from 2 bits."""
    ids, model = random_ids(1, 160), model_of()
    exact = model(ids).logits
    errors = []
    for equalizes in (False, True):
        patch(model, "kivi", **{**SETTINGS, "equalize_k": equalizes, "v_bits": 4})
        cache = model(ids[:, :130]).past_key_values
        errors.append((model(ids[:, 130:], past_key_values=cache).logits - exact[:, 130:]).norm())
    assert errors[1] < 0.9 * errors[0]


def test_every_cache_of_a_model_has_its_scales():
    model, ids = patch(model_of(), "kivi", **SETTINGS), random_ids(2, 150)
    want = [constants["k.equalizer"] for constants in model._qattn.constants]
    cache = model(ids).past_key_values
    caches = [cache, copy.deepcopy(cache)]
    cache.crop(-30)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    model(ids, past_key_values=cache)
    assert all(torch.equal(x, y) for one in caches for x, y in zip(held(one), want, strict=True))
    release(model)


def test_a_saved_prefix_goes_on_with_its_scales(tmp_path: Path):
    model, ids = patch(model_of(), "kivi", **SETTINGS), random_ids(1, 150)
    cache = model(ids).past_key_values
    cache.save(tmp_path / "prefix.safetensors")
    loaded = QAttnCache.load(tmp_path / "prefix.safetensors", model)
    more = random_ids(1, 90, seed=2)
    assert torch.equal(*[model(more, past_key_values=one).logits for one in (cache, loaded)])
    plain = patch(model_of(), "kivi", **{**SETTINGS, "equalize_k": False})
    with pytest.raises(UnsupportedError, match="patch the model with the file's recipe"):
        QAttnCache.load(tmp_path / "prefix.safetensors", plain)


def test_settings_and_caches_that_cannot_be_are_refused():
    for method, needed in (("kivi", "rotate_k='hadamard'"), ("nf4", "rotate='hadamard'"), ("turboquant", "k_format")):
        with pytest.raises(RecipeError, match=f"equalize_k needs rotated keys: set .*{needed}"):
            patch(tiny_llama(), method, equalize_k=True)
    with pytest.raises(RecipeError, match="latent attention"):
        patch(tiny("deepseek_v3"), "kivi", **SETTINGS)
    model = patch(model_of(), "kivi", **SETTINGS)
    with pytest.raises(UnsupportedError, match="made without a model"):
        model(random_ids(1, 5), past_key_values=QAttnCache(model._qattn.specs, model._qattn.recipe))


def test_a_layer_without_a_model_multiplies_by_nothing():
    spec = make_layer(("kivi", SETTINGS)).spec
    layer = QAttnLayer(spec, 512)
    feed(layer, *random_qkv(1, 70), [70])
    assert bool((layer.state["k.equalizer"] == 1).all())
