"""`cache: model`: attention of this package over transformers' own caches."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from helpers import DEVICE, error, random_ids, tiny_llama
from test_models import FAMILIES, tiny
from test_models import padded as padded_batch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, StaticCache
from typer.testing import CliRunner

from qattn_hf import QAttnCache, patch, report, unpatch
from qattn_hf.cli import app
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_kernels.layer.spec import SHORT_CALL

pytestmark = pytest.mark.usefixtures("no_grad")

TOKENS, NEW = 100, 6
OVER = {"method": "sage2", "cache": "model"}
EXACT = {**OVER, "prefill_compute": "model"}  # nothing is rounded to codes: what is left is rounding of fp32
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
NOISE = 0.03  # of logits, root mean square: 0.011 with INT8 and E4M3, mostly from E4M3


def static(model: Any, length: int = 192) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=length)


# In a model


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_prefill_is_ours_and_generate_keeps_the_stock_cache(how):
    model, ids = tiny_llama(), random_ids(2, TOKENS)
    want = model.generate(ids, **GREEDY, **how)
    logits = model(ids).logits
    patch(model, **OVER)
    assert 1e-3 < error(model(ids).logits, logits) < NOISE
    out = model.generate(ids, **GREEDY, **how, return_dict_in_generate=True)
    assert type(out.past_key_values) is (StaticCache if how else DynamicCache)
    assert torch.equal(out.sequences, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Without codes the logits of a padded batch and all answers are full precision's."""
    model, (ids, mask) = tiny(FAMILIES[family]), padded_batch()
    real = mask == 1
    want, text = model(ids, attention_mask=mask).logits[real], model.generate(ids, attention_mask=mask, **GREEDY)
    patch(model, **EXACT)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[real], want, rtol=0, atol=1e-4)
    for how in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY, **how), text)
    patch(model, **OVER)
    assert 1e-3 < error(model(ids, attention_mask=mask).logits[real], want) < 0.1


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_chunks_and_steps_equal_full_precision_without_codes(kind):
    """Chunks have more keys than queries, and a static cache columns that nothing fills yet; the steps are torch's."""
    model, ids = tiny_llama(num_key_value_heads=1), random_ids(2, TOKENS + 3)
    want = model(ids).logits
    patch(model, **EXACT)
    cache = DynamicCache() if kind == "dynamic" else static(model)
    cuts = [0, 40, 45, TOKENS, *range(TOKENS + 1, TOKENS + 4)]
    got = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.gpu
def test_kernels_in_a_model():
    """In the interpreter without a GPU; over a static cache, in chunks and padded."""
    model, ids = tiny_llama(head_dim=64).to(DEVICE), random_ids(2, TOKENS).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    want, got = [], []
    for impl, logits in (("reference", want), ("triton", got)):
        patch(model, **OVER, impl=impl)
        cache = static(model)
        for start, end in ((0, 50), (50, TOKENS)):
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            logits.append(out.logits[mask[:, start:end] == 1])
        assert report(model).to_dict()["impl"] == impl
    assert error(torch.cat(got), torch.cat(want)) < NOISE / 10  # a code here and there is the next one


def test_chunks_have_the_noise_of_the_whole():
    model, ids = tiny_llama(), random_ids(1, TOKENS)
    want = model(ids).logits
    patch(model, **OVER)
    cache = static(model)
    got = [model(part, past_key_values=cache).logits for part in ids.split([50, 50], 1)]
    assert error(torch.cat(got, 1), want) < NOISE


@pytest.mark.parametrize("settings", [{}, {"bits": 4, "smooth_q": "tensor"}, {"granularity": "tensor"}], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding(side, settings):
    """Without codes a padded row is the row alone; with them it has no more noise."""
    model, ids = tiny_llama(), random_ids(2, TOKENS)
    mask = torch.ones_like(ids)
    start = {"left": 0, "right": TOKENS - 37, "between": 40}[side]
    mask[0, start : start + 37] = 0
    real, positions = mask[0] == 1, (mask.cumsum(1) - 1).clamp(min=0)
    alone = model(ids[:1, real]).logits[0]

    def padded(cache: Any = None) -> torch.Tensor:
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[0, real]

    patch(model, **EXACT)
    for cache in (None, static(model)):
        torch.testing.assert_close(padded(cache), alone, rtol=0, atol=1e-5)
    patch(model, **{**OVER, "method": "paper_sage2"}, **settings)
    most = max(NOISE, 1.5 * error(model(ids[:1, real]).logits[0], alone))
    assert 1e-3 < error(padded(), alone) < most
    assert model(ids, attention_mask=mask).logits.isfinite().all()


def test_softcap_in_long_and_short_calls():
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16, pad_token_id=0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, layer_types=["full_attention"] * 2)
    torch.manual_seed(0)
    config = Gemma2Config(**sizes, **heads, attn_logit_softcapping=2.0, query_pre_attn_scalar=1, initializer_range=0.1)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    ids = random_ids(2, TOKENS + 9)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    want, first = model(ids, attention_mask=mask).logits, model(ids[:, :8]).logits
    patch(model, **EXACT)
    torch.testing.assert_close(model(ids[:, :8]).logits, first, rtol=0, atol=1e-5)
    cache, real = static(model), mask[:, TOKENS:] == 1
    model(ids[:, :TOKENS], attention_mask=mask[:, :TOKENS], past_key_values=cache)
    got = model(ids[:, TOKENS:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(got[real], want[:, TOKENS:][real], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_compiles_over_a_static_cache_without_a_break():
    model, ids = tiny_llama(num_hidden_layers=1), random_ids(1, TOKENS + 1)
    patch(model, **OVER)
    want, got = static(model), static(model)
    run = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for a, b in ((0, TOKENS), (TOKENS, TOKENS + 1)):
        pair = (call(ids[:, a:b], past_key_values=c).logits for call, c in ((model, want), (run, got)))
        torch.testing.assert_close(*pair, rtol=0, atol=1e-5)


def test_unpatch_copy_and_pickle():
    model, ids = tiny_llama(), random_ids(2, TOKENS)
    want, before = model(ids).logits, set(vars(model))
    patch(patch(model, "turbo"), **OVER)
    got = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, got)
    assert torch.equal(patch(model, **OVER, granularity="block")(ids).logits, model(ids).logits)
    assert not torch.equal(model(ids).logits, got)
    assert torch.equal(unpatch(model)(ids).logits, want)
    assert set(vars(model)) == before
    assert (
        model.generate(ids, **GREEDY, return_dict_in_generate=True).past_key_values.get_seq_length() == TOKENS + NEW - 1
    )


def test_report_says_that_nothing_is_packed():
    model = patch(tiny_llama(), **OVER)
    model(random_ids(1, TOKENS))
    found = report(model)
    assert (found.to_dict()["packed_tokens"], found.to_dict()["decode"], found.layers) == (0, "stock", [])
    for part in ("nothing is packed", "transformers' own cache", f"at most {SHORT_CALL} tokens", "reference"):
        assert part in " ".join(str(found).split())


@pytest.mark.parametrize(
    "command", [["cache", "report", "--tokens", "40"], ["generate", "--prompt", "a", "--max-new-tokens", "2"]]
)
def test_command_line(command):
    done = CliRunner().invoke(app, [*command, "--method", "sage2", "--set", "cache=model"])
    assert done.exit_code == 0
    assert "nothing" in done.output
    assert "transformers' own cache" in " ".join(done.output.split())


# Refusals


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"sparse_v_tau": 0.1}, ("sparse_v_tau=0.1", "cache='model'")),
        ({"crop_horizon": 128}, ("crop_horizon=128", "cache='model'")),
        ({"decode": "graph"}, ("decode='graph'", "cache='model'")),
        ({"decode_compute": "int8"}, ("decode_compute='int8'", "cache='model'", "prefill_compute")),
        ({"compute": "int8"}, ("compute='int8'", "cache='model'")),
        (
            {"method": "paper_sage2", "granularity": "tensor", "impl": "triton"},
            ("granularity is 'tensor'", "impl='auto'"),
        ),
    ],
    ids=str,
)
def test_settings_that_clash(settings, parts):
    model = tiny_llama(head_dim=64)
    with pytest.raises(RecipeError) as error:
        patch(model, **{**OVER, **settings})
    assert all(part in str(error.value) for part in parts)
    assert not hasattr(model, "_qattn")


def test_mask_without_the_past():
    model, ids = patch(tiny_llama(), **OVER), random_ids(1, TOKENS)
    cache = model(ids).past_key_values
    with pytest.raises(UnsupportedError, match=f"{TOKENS} cached and {TOKENS} new"):
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)


def test_no_packed_cache_for_it():
    model, ids = tiny_llama(), random_ids(1, TOKENS)
    for call in (lambda: QAttnCache.for_model(model, **OVER), lambda: QAttnCache.for_model(patch(model, **OVER))):
        with pytest.raises(UnsupportedError, match=r"packs nothing.*cache='quantized'"):
            call()
    for count in (TOKENS, 5):
        with pytest.raises(UnsupportedError, match="not a QAttnCache"):
            model(ids[:, :count], past_key_values=QAttnCache.for_model(model, "turbo"))
    with pytest.raises(UnsupportedError, match="packs nothing"):
        CliRunner().invoke(app, ["demo", "--method", "sage2", "--set", "cache=model"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(1, 1, TOKENS, TOKENS).tril().bool()}, "custom attention mask"),
        ({"is_causal": False}, "causal"),
        ({"cu_seq_lens_q": torch.tensor([0, 40, TOKENS])}, "packed sequences"),
        ({"position_ids": torch.arange(TOKENS)[None] % 50, "use_cache": False}, "packed sequences"),
    ],
    ids=str,
)
def test_calls_that_are_refused(how, part):
    model, ids = patch(tiny_llama(), **OVER), random_ids(1, TOKENS)
    with pytest.raises(UnsupportedError, match=part):
        model(ids, **how)
