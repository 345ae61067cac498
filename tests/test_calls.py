"""Calls without a cache, checkpoints that request another cache, and weights on other devices all work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from helpers import random_ids, tiny_llama
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, Trainer, TrainingArguments

from qattn_hf import QAttnCache, UnsupportedError, patch, report, unpatch
from qattn_hf.generate.cuda_graph.capture import why_not
from qattn_hf.model._compat import CACHE
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import feed

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = random_ids(2, 70)
GREEDY = {"max_new_tokens": 3, "do_sample": False}
OVER = {"method": "sage2", "cache": "model"}
HOW = [{"method": "none"}, {"method": "turbo"}, OVER]


# Without a cache


@pytest.mark.parametrize("by", ["call", "config"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_use_cache_false(how, by):
    """Attention reads through a packed cache of that call alone, and the output has none, as from a stock model."""
    model = patch(tiny_llama(use_cache=by == "call"), **how)
    asked = {"use_cache": False} if by == "call" else {}
    want = model(IDS, use_cache=True)
    for part in (model, model.get_decoder()):
        assert part(IDS, use_cache=True).past_key_values is not None
        assert part(IDS, **asked).past_key_values is None
        assert CACHE not in part(IDS, **asked)
        assert len(part(IDS, **asked, return_dict=False)) == 1
    assert torch.equal(model(IDS, **asked).logits, want.logits)
    assert int(want.past_key_values.get_seq_length()) == 70
    if how == {"method": "turbo"}:
        assert report(model).to_dict()["packed_tokens"] == 2 * 64


def test_use_cache_false_goes_on_with_a_cache_that_was_passed():
    model = patch(tiny_llama(), "turbo")
    cache = model(IDS[:, :64]).past_key_values
    out = model(IDS[:, 64:], past_key_values=cache, use_cache=False)
    assert out.past_key_values is None and int(cache.get_seq_length()) == 70


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_is_passed_by_either_name_of_transformers(name: str):
    model = patch(tiny_llama(), "turbo")
    *_, want = feed(model, IDS, [0, 64, 70])
    cache = model(IDS[:, :64])[CACHE]
    out = model(IDS[:, 64:], **{name: cache})
    assert out[CACHE] is cache and torch.equal(out.logits, want.logits)
    assert int(cache.get_seq_length()) == 70
    tokens = model.generate(IDS, **{name: QAttnCache.for_model(model)}, **GREEDY)
    assert torch.equal(tokens, model.generate(IDS, **GREEDY))
    with pytest.raises(UnsupportedError, match=f"not a DynamicCache.* or no {CACHE}"):
        model(IDS, **{name: DynamicCache(config=model.config)})


@pytest.mark.filterwarnings("error:`past_key_values` is deprecated")
def test_no_call_of_our_own_uses_the_old_name_where_it_is_deprecated(caplog):
    model = patch(tiny_llama(), "turbo")
    model.generate(IDS, **GREEDY)
    model.generate(IDS[:1], prompt_lookup_num_tokens=2, **GREEDY)
    *_, last = feed(model, IDS, [0, 40, 70])
    assert int(last.cache.get_seq_length()) == 70
    assert not [record for record in caplog.records if "`past_key_values`" in record.message]


def test_generate_of_a_checkpoint_whose_config_says_use_cache_false():
    model = patch(tiny_llama(use_cache=False), "turbo")
    with pytest.raises(UnsupportedError, match="use_cache=True"):
        model.generate(IDS, **GREEDY)
    want = patch(tiny_llama(), "turbo").generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, use_cache=True, **GREEDY), want)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_generate_without_a_cache_computes_each_step_anew(settings):
    model, answers = patch(tiny_llama(), "none"), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        out = model.generate(IDS, **{**GREEDY, **settings}, use_cache=use_cache, return_dict_in_generate=True)
        answers.append(out.sequences)
        assert (out.past_key_values is not None) == use_cache
    assert torch.equal(*answers)


@pytest.mark.parametrize("sizes", [{}, {"use_cache": False}], ids=str)
def test_trainer_evaluates_a_patched_model(sizes, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    settings = TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)

    def loss(model: PreTrainedModel) -> float:
        return Trainer(model, settings, eval_dataset=rows).evaluate()["eval_loss"]

    assert loss(patch(tiny_llama(**sizes), "none")) == pytest.approx(loss(tiny_llama(**sizes)), abs=1e-5)


# Another cache


@pytest.mark.parametrize("named", ["static", "offloaded", "quantized"])
def test_checkpoint_that_names_a_cache_of_its_own(named, caplog):
    """Only who asks for another cache in a call is refused; the checkpoint's stays as it was."""
    model = tiny_llama()
    want = patch(model, "turbo").generate(IDS, **GREEDY)
    assert not caplog.messages
    model.generation_config.cache_implementation = named
    patch(model, "turbo")
    assert f"cache_implementation='{named}'" in caplog.text and "is not used" in caplog.text
    got = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(got.sequences, want) and isinstance(got.past_key_values, QAttnCache)
    cache = model(IDS[:, :-1]).past_key_values
    assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY)[:, :70], IDS)
    one = {"prompt_lookup_num_tokens": 2, **GREEDY}
    assert torch.equal(model.generate(IDS[:1], **one), model.generate(IDS[:1], **GREEDY))
    other = "static" if named != "static" else "offloaded"
    for asked in ({"cache_implementation": other}, {"generation_config": GenerationConfig(cache_implementation=other)}):
        with pytest.raises(UnsupportedError, match=f"cache_implementation='{other}'"):
            model.generate(IDS, **asked, **GREEDY)
    assert model.generation_config.cache_implementation == named


# Padding


@pytest.mark.parametrize("how", HOW, ids=str)
def test_row_without_a_token_leaves_the_others_alone(how):
    model, mask = patch(tiny_llama(), **how), torch.ones_like(IDS)
    mask[0] = 0
    out = model(IDS, attention_mask=mask)
    torch.testing.assert_close(out.logits[1], model(IDS[1:]).logits[0], rtol=0, atol=1e-5)
    assert torch.isfinite(out.logits).all()
    more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    later = model(IDS[:, :1], attention_mask=more, past_key_values=out.past_key_values).logits
    torch.testing.assert_close(later[0], model(IDS[:1, :1]).logits[0], rtol=0, atol=1e-5)


# Weights elsewhere


def on_cpu(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    return cpu_offload(model, execution_device=torch.device("cpu"))


def on_disk(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    disk_offload(model, folder, execution_device=torch.device("cpu"))
    return model


def on_both(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    return dispatch_model(model, dict(zip(parts, ["cpu", "disk"] * 3, strict=True)), "cpu", offload_dir=folder)


@pytest.mark.parametrize("first", ["offload", "patch"])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("offload", [on_cpu, on_disk, on_both])
def test_offloaded_weights(offload: Callable, how: dict[str, Any], first: str, tmp_path):
    want = patch(tiny_llama(), **how)
    text, logits, stock = want.generate(IDS, **GREEDY), want(IDS).logits, tiny_llama()(IDS).logits
    model = tiny_llama()
    steps = [lambda m: offload(m, str(tmp_path)), lambda m: patch(m, **how)]
    for step in steps if first == "offload" else reversed(steps):
        model = step(model)
    assert torch.equal(model.generate(IDS, **GREEDY), text)
    assert torch.equal(model(IDS).logits, logits)
    if how == {"method": "turbo"}:
        assert QAttnCache.for_model(model).layers[0].device_type == "cpu"
    assert torch.equal(unpatch(model)(IDS).logits, stock)


def test_device_of_offloaded_weights():
    model = tiny_llama()
    assert device_of(model).type == "cpu" and why_not(model) == "the model is on the cpu"
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta" and device_of(model).type == "cpu"
    for module in model.modules():
        if hasattr(module, "_hf_hook") and hasattr(module._hf_hook, "execution_device"):
            module._hf_hook.execution_device = "cuda:0"
    assert device_of(model).type == "cuda" and "offloaded" in why_not(model)


# Compiled


@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_was_compiled_before_patch(fullgraph):
    """Its calls are compiled again. A new cache is made and allocated outside the compiled code."""
    model, uncompiled = tiny_llama(), patch(tiny_llama(), "turbo")
    model.compile(backend="aot_eager", fullgraph=fullgraph)
    stock = model(IDS).logits
    patch(model, "turbo")
    cache, want = QAttnCache.for_model(model, max_cache_len=128), uncompiled(IDS).logits
    for new in ({}, {"past_key_values": cache}):
        if fullgraph:
            with pytest.raises(Exception, match="a cache that an uncompiled call wrote to"):
                model(IDS, **new)
        else:
            out = model(IDS, **new)
            assert torch.equal(out.logits, want) and not torch.equal(want, stock)
            assert int(out.past_key_values.get_seq_length()) == IDS.shape[1]
            assert out.past_key_values.layers[0].capacity == 128, "more than a new cache has before its first call"
    assert torch.equal(unpatch(model)(IDS).logits, stock)


@pytest.mark.slow
def test_a_compiled_step_has_one_input_a_layer():
    """Guards and arguments of a compiled step cost the host as much as all that it computes, if there are hundreds."""
    model = patch(tiny_llama(num_hidden_layers=3), "turbo")
    cache = QAttnCache.for_model(model, max_cache_len=256)
    model(IDS, past_key_values=cache)
    given: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable:
        given.append([node.name for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward

    step = torch.compile(model.forward, backend=backend, fullgraph=True)
    for _ in range(3):
        step(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)
    (names,) = given  # no step was compiled again
    assert sum("past_key_values" in name for name in names) == 3
    assert int(cache.get_seq_length()) == 73
