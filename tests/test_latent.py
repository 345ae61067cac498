"""Multi-head latent attention: patched models are the stock models, and each latent is stored once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from refusals import refused
from small_configs import small_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from qattn_hf import QAttnCache, RecipeError, UnsupportedError, patch, report, unpatch
from qattn_hf.fidelity.compare import compare
from qattn_hf.fidelity.inspection import inspect
from qattn_hf.fidelity.tune import Budget, tune
from qattn_hf.model.latent import latent_modules, up_projections
from qattn_hf.model.selection import attending
from qattn_hf.planning.check import check
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes.recipe import find_recipes
from qattn_kernels.layer.scores import Scores

pytestmark = pytest.mark.usefixtures("no_grad")

TYPES = ["deepseek_v3", "deepseek_v2", "minicpm3"]
RANK, ROPE, BLOCK = 32, 16, 64
IDS = torch.randint(3, 90, (2, 100), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :11] = 0
GREEDY = {"max_new_tokens": BLOCK + 2, "min_new_tokens": BLOCK + 2, "do_sample": False}
SHORT = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def tiny(model_type: str = "deepseek_v3") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.float32).eval()


def patched(model: PreTrainedModel, method: str = "none", **settings: Any) -> PreTrainedModel:
    return patch(model, method, family=False, **settings)


@pytest.fixture(params=TYPES)
def model(request) -> PreTrainedModel:
    return tiny(request.param)


@pytest.mark.slow
def test_greedy_tokens_are_the_stock_models(model):
    want, logits = model.generate(IDS, attention_mask=MASK, **GREEDY), model(IDS).logits
    patched(model)
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), want)
    # fp32 sums in another order: products with W_UK and W_UV come before and after the softmax
    torch.testing.assert_close(model(IDS).logits, logits, rtol=0, atol=1e-5)
    assert torch.equal(unpatch(model)(IDS).logits, logits)
    assert not any("expand_kv" in vars(module) for _, module in latent_modules(model))


@pytest.mark.parametrize("method", ["int8", "turbo", "kivi", "fp8", "nf4"])
def test_rows_of_a_padded_batch_are_as_alone(model, method):
    patched(model, method)
    batch = model.generate(IDS, attention_mask=MASK, **SHORT)
    for i, row in enumerate(batch):
        alone = model.generate(IDS[i : i + 1, MASK[i] == 1], **SHORT)
        assert torch.equal(row[-8:], alone[0, -8:])


@pytest.mark.parametrize(("method", "levels"), [("int8", 127), ("fp8", 16), ("turbo", 8), ("kivi", 7)])
def test_what_a_method_stores_moves_attention_by_its_step(method, levels):
    """Codes with steps of `maximum / levels` are off by half a step at most, and so are attended values, which average
    latents. Errors of the scores in the latent and the RoPE part move the weights, and each part may add the same error
    again."""
    layer = QAttnCache.for_model(patched(tiny(), method)).layers[0]
    g = torch.Generator().manual_seed(0)
    rope, latent = (torch.randn(1, 1, 140, n, generator=g) for n in (ROPE, RANK))
    query, scale = torch.randn(1, 4, 140, RANK + ROPE, generator=g), 0.1
    out = []
    for start, end in ((0, 130), (130, 140)):
        handle = layer.update(latent[:, :, start:end], rope[:, :, start:end])[0]
        span = torch.tensor([[0, end - start]], dtype=torch.int32)
        out.append(layer.attend(query[:, :, start:end], handle, span, Scores(scale))[0])
    keys = torch.cat([latent, rope], -1).double()
    mask = torch.ones(140, 140).tril().bool()
    weights = (query.double() @ keys.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1)
    error = (torch.cat(out, 2) - weights @ latent.double()).abs().max()
    assert 0 < error < 1.5 * latent.abs().max() / levels


def test_absorbed_products_are_the_expanded_ones(model):
    module = next(module for _, module in latent_modules(model)).double()
    g = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(1, 1, 9, n, generator=g, dtype=torch.float64) for n in (RANK, ROPE))
    query = torch.randn(1, 4, 9, module.qk_nope_head_dim + ROPE, generator=g, dtype=torch.float64)
    weights = torch.rand(1, 4, 9, 9, generator=g, dtype=torch.float64)
    key, value = module.expand_kv(latent, rope)
    up = up_projections(module)
    torch.testing.assert_close(up.absorb(query) @ torch.cat([latent, rope], -1).mT, query @ key.mT)
    torch.testing.assert_close(up.expand(weights @ latent), weights @ value)
    torch.testing.assert_close(up.expand_kv(latent, rope), (key, value))


@pytest.mark.parametrize("method", ["none", "int8", "turbo", "kivi"])
def test_each_latent_is_counted_once(method):
    model = patched(tiny(), method)
    cache = model(IDS).past_key_values
    data = report(model).to_dict()
    values = IDS.numel() * (RANK + ROPE)
    assert [row["values"] for row in data["layers"]] == [values] * 2
    assert data["kv_bytes"] == sum(t.nbytes for t, _ in cache.state_tensors().values())
    assert [row["bytes_full_precision"] for row in data["layers"]] == [4 * values] * 2
    assert "latent attention" in str(report(model))
    found = check(model.config, method, device_type="cpu")
    assert found.refused is None and found.bytes_per_token_full_precision == 2 * 4 * (RANK + ROPE)
    on_gpu = check(model.config, method, device_type="cuda")
    assert on_gpu.layers[0]["kernels"] == "triton" and on_gpu.layers[0]["no_kernels"] is None


def test_a_second_turn_and_crop_are_one_call_after_another():
    model = patched(tiny(), "turbo")
    want = model.generate(IDS, **SHORT)
    cache = model.generate(IDS, return_dict_in_generate=True, **SHORT).past_key_values
    cache.crop(-7)  # `generate` leaves the last token out of the cache
    again = model.generate(want[:, :101], past_key_values=cache, **{**SHORT, "max_new_tokens": 7, "min_new_tokens": 7})
    assert torch.equal(again, want)


def test_assisted_generation_gives_the_stock_models_tokens():
    model, how = tiny(), {"assistant_model": tiny_llama(vocab_size=101)}
    want = model.generate(IDS[:1], **SHORT, **how)
    assert torch.equal(patched(model).generate(IDS[:1], **SHORT, **how), want)


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies_of_a_patched_model(how):
    model = patched(tiny(), "int8")
    twin = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
    assert torch.equal(twin.generate(IDS, **SHORT), model.generate(IDS, **SHORT))
    unpatch(twin)(IDS)
    assert torch.equal(model.generate(IDS, **SHORT), patched(twin, "int8").generate(IDS, **SHORT))


@pytest.mark.parametrize(
    ("method", "settings", "what"),
    [
        ("turboquant", {}, "a rotation"),
        ("sage2", {}, "smoothing"),
        ("int_flash", {}, "integer or FP8 products"),
        ("int8", {"smooth_k": True}, "smoothing"),
        ("turbo", {"impl": "triton", "sparse_v_tau": 1e-3}, "sparse V"),
        ("sinkq", {"sink_skip_layers": 0}, "a sink pool"),
    ],
)
def test_methods_that_need_whole_keys_are_refused(method, settings, what):
    model = tiny()
    before = model(IDS).logits
    refused(lambda: patch(model, method, family=False, **settings), RecipeError, what)
    assert torch.equal(model(IDS).logits, before)


def test_modules_that_cannot_absorb_are_refused():
    class Quantized(torch.nn.Linear):
        pass

    model = tiny()
    _, module = next(latent_modules(model))
    plain = module.kv_b_proj
    module.kv_b_proj = Quantized(plain.in_features, plain.out_features, bias=False)
    refused(lambda: patch(model, "int8"), UnsupportedError, "kv_b_proj", "plain linear layer", "stock cache")
    module.kv_b_proj = plain
    module.expand_kv = lambda latent, rope: (latent, rope)
    refused(lambda: patch(model, "int8"), UnsupportedError, "expand_kv", "load the model anew")
    del module.expand_kv
    patch(model, "int8")
    module.kv_b_proj = Quantized(plain.in_features, plain.out_features, bias=False)  # as an adapter does
    refused(lambda: model(IDS), UnsupportedError, "kv_b_proj", "adapters")


def test_attention_over_stock_caches_is_refused():
    def observe(model: PreTrainedModel) -> None:
        with attending(model, "sdpa"):
            raise AssertionError("was not refused")

    model = tiny()
    refused(lambda: observe(model), UnsupportedError, "latent attention (MLA)", "stock cache")


def test_what_watches_keys_and_values_is_refused():
    reading, recipes = read_as(random_ids(1, 150)), find_recipes(["int8"])
    for call in (
        lambda: compare(tiny(), recipes, reading),
        lambda: inspect(tiny(), recipes["int8"], reading.ids),
        lambda: tune(tiny(), recipes, reading, reading, Budget(bits=12.0)),
    ):
        with pytest.raises(UnsupportedError, match="latent attention"):
            call()
