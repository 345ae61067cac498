"""Weights that are not the stock ones: adapters before and after `patch`, and quantized weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from transformers import PreTrainedModel

from qattn_hf import patch, report, unpatch

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = random_ids(2, 20)
GREEDY = {"input_ids": IDS, "max_new_tokens": 70, "min_new_tokens": 70, "do_sample": False}  # past a block of 64


def packed(model: PreTrainedModel) -> PreTrainedModel:
    return patch(model, "none", impl="reference")


class TestAdapters:
    """LoRA of peft on queries, keys and values."""

    @pytest.fixture
    def adapted(self) -> Any:
        peft = pytest.importorskip("peft", reason="adapters need peft")
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        return lambda model: peft.get_peft_model(model, settings).eval()

    def test_before_patch_switched_and_merged(self, adapted):
        wrapper, stock = adapted(tiny_llama()), tiny_llama().generate(**GREEDY)
        want = wrapper.generate(**GREEDY)
        model = packed(wrapper.get_base_model())
        assert torch.equal(wrapper.generate(**GREEDY), want) and not torch.equal(want, stock)
        assert report(model).to_dict()["packed_tokens"] > 0
        with wrapper.disable_adapter():
            assert torch.equal(wrapper.generate(**GREEDY), stock)
        assert torch.equal(wrapper.generate(**GREEDY), want)
        merged = wrapper.merge_and_unload()
        assert merged is model
        torch.testing.assert_close(merged(IDS).logits, unpatch(merged)(IDS).logits, rtol=0, atol=1e-5)  # fp32 sums

    def test_after_patch_and_unpatched_below_it(self, adapted):
        model = packed(tiny_llama())
        wrapper = adapted(model)
        got = wrapper.generate(**GREEDY)
        assert report(model).to_dict()["packed_tokens"] > 0
        unpatch(model)
        assert torch.equal(got, wrapper.generate(**GREEDY))


def test_weights_quantized_by_torchao_stay_as_they_are():
    """INT8 weights: the same tokens through the cache, whose bytes are those of the stock model's cache."""
    quantization = pytest.importorskip("torchao.quantization", reason="quantized weights need torchao")
    stock = tiny_llama()
    model = copy.deepcopy(stock)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    weight, want = model.model.layers[0].self_attn.q_proj.weight, model.generate(**GREEDY)
    assert torch.equal(packed(model).generate(**GREEDY), want)
    assert model.model.layers[0].self_attn.q_proj.weight is weight and type(weight) is not torch.nn.Parameter
    found = []
    for each in (model, stock):
        patch(each, "int8", impl="reference").generate(**GREEDY)
        found.append(report(each).to_dict())
    assert found[0]["kv_bytes"] == found[1]["kv_bytes"] and found[0]["effective_bits"] == found[1]["effective_bits"]
