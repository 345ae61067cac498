"""Weights that are not the stock ones: adapters before and after `patch`, and quantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from quantized_weights import KINDS, measure
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from qattn_hf import QAttnCache, UnsupportedError, patch, report, unpatch

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = random_ids(2, 60)
GREEDY = {"input_ids": IDS, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}  # past a block of 64


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


QUICK = "torchao INT8"
SLOW = [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow, id=name) for name in KINDS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("name", SLOW)
def test_quantized_weights_stay_as_they_are(name):
    """Each kind as transformers loads it: the stock model's tokens, the float model's report, the same weights."""
    for package in KINDS[name].packages:
        pytest.importorskip(package.replace("-", "_"), reason=f"{name} needs {package}")
    found = measure(KINDS[name])
    assert found and [what for what, as_should_be in found.items() if not as_should_be] == []


class CodesLinear(torch.nn.Module):
    """A linear map of 8-bit codes in buffers, without `weight`: the interface of layers whose kernels need a GPU."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales).T


def with_codes(model: PreTrainedModel) -> PreTrainedModel:
    linears = [name for name, part in model.named_modules() if name != "lm_head" and type(part) is torch.nn.Linear]
    for name in linears:
        model.set_submodule(name, CodesLinear(model.get_submodule(name)))
    return model


def test_layers_without_a_weight_stay_as_they_are():
    model, plain = with_codes(tiny_llama()), tiny_llama()
    held, want = list(model.buffers()), model.generate(**GREEDY)
    assert torch.equal(packed(model).generate(**GREEDY), want) and not torch.equal(plain.generate(**GREEDY), want)
    for each in (model, plain):
        patch(each, "int8", impl="reference").generate(**GREEDY)
    assert str(report(model)) == str(report(plain))
    assert torch.equal(unpatch(model).generate(**GREEDY), want)
    assert all(a is b for a, b in zip(held, model.buffers(), strict=True))


def test_a_cache_knows_codes_in_buffers(tmp_path):
    model, other = with_codes(tiny_llama()), with_codes(tiny_llama())
    packed(model)(IDS).past_key_values.save(tmp_path / "cache.safetensors")
    QAttnCache.load(tmp_path / "cache.safetensors", packed(other))
    other.model.layers[1].self_attn.k_proj.qweight += 1
    with pytest.raises(UnsupportedError, match="other weights"):
        QAttnCache.load(tmp_path / "cache.safetensors", other)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_around_the_decoder_stays(when):
    """Liger-Kernel replaces the model's forward by one that calls the decoder."""
    model, called = tiny_llama(), []
    want = model.generate(**GREEDY)
    if when == "after":
        packed(model)
    model.forward = lambda *args, **kwargs: called.append(1) or type(model).forward(model, *args, **kwargs)
    if when == "before":
        packed(model)
    assert torch.equal(model.generate(**GREEDY), want) and called
    assert report(model).to_dict()["packed_tokens"] > 0
    assert torch.equal(unpatch(model).generate(**GREEDY), want) and "forward" in vars(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_liger_kernel(when, monkeypatch):
    """Its forwards stay. The one around the decoder runs; forwards of norms and MLPs need a GPU and do not run."""
    liger = pytest.importorskip("liger_kernel.transformers", reason="fused parts of Liger-Kernel need liger-kernel")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)  # put back later
    for name in ("LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    model, whole = tiny_llama(), tiny_llama()
    want = model.generate(**GREEDY)
    for each, kernels in ((model, False), (whole, True)):
        if when == "after":
            packed(each)
        liger._apply_liger_kernel_to_instance(model=each, rope=kernels, rms_norm=kernels, swiglu=kernels)
        forwards = {name: vars(part)["forward"] for name, part in each.named_modules() if "forward" in vars(part)}
        assert "" in forwards and len(forwards) == (8 if kernels else 1)
        packed(each)
        assert all(vars(each.get_submodule(name))["forward"] is own for name, own in forwards.items())
    monkeypatch.undo()
    assert torch.equal(model.generate(**GREEDY), want)
    for each in (model, whole):
        unpatch(each)
    assert all(vars(whole.get_submodule(name))["forward"] is own for name, own in forwards.items())
    assert torch.equal(model.generate(**GREEDY), want)
