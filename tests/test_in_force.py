"""A prefix belongs to what was in force when it was read: the adapters that were on, and RoPE's frequencies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qattn_hf import QAttnCache, UnsupportedError, patch
from qattn_hf.saved.in_force import in_force
from qattn_hf.saved.writer import difference, identity

pytestmark = pytest.mark.usefixtures("no_grad")

PREFIX, QUESTION = random_ids(1, 100), random_ids(1, 20, seed=2)


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    modules = ["q_proj", "k_proj", "v_proj"]
    return peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM", **changes)


class Adapted:
    """A patched model with the adapters `one`, which is active, and `two`.

    They are wrapped by peft, or injected like transformers' `load_adapter` and `add_adapter`, which need a newer peft
    than the installed one.
    """

    def __init__(self, wrapped: bool):
        import peft

        base = tiny_llama()
        if wrapped:
            outer = peft.get_peft_model(base, lora(), adapter_name="one")
            outer.add_adapter("two", lora(lora_alpha=16))
        else:
            peft.inject_adapter_in_model(lora(), base, "one")
            peft.inject_adapter_in_model(lora(lora_alpha=16), base, "two")
        self.model = patch(base.eval(), "none")
        self.on("one")
        self.weights = [layer.base_layer.weight.clone() for layer in self.layers()]

    def on(self, name: str) -> None:
        for layer in self.layers():  # as `set_adapter` of peft and of transformers
            layer.set_adapter(name)

    def restore(self) -> None:
        """As after the beginning."""
        for layer, weight in zip(self.layers(), self.weights, strict=True):
            if layer.merged:
                layer.unmerge()
                layer.base_layer.weight.data.copy_(weight)  # which that rounds
            layer.enable_adapters(True)
            layer.scaling["one"] = 2.0
        self.on("one")

    def layers(self) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(getattr(module, "scaling", None), dict)]

    def scale(self, by: float) -> None:
        for layer in self.layers():
            layer.scaling["one"] *= by


def scaled(adapted: Adapted) -> None:
    adapted.scale(3)


def switched_off(adapted: Adapted) -> None:
    for layer in adapted.layers():
        layer.enable_adapters(False)


def merged(adapted: Adapted) -> None:
    for layer in adapted.layers():
        layer.merge()


CHANGES: dict[str, tuple[Callable[[Adapted], Any], str]] = {
    "other": (lambda adapted: adapted.on("two"), "were one by 2 and are two by 4 here"),
    "off": (switched_off, "were one by 2 and are off here"),
    "scaled": (scaled, "were one by 2 and are one by 6 here"),
    "merged": (merged, "were one by 2 and are merged one here"),
}


@pytest.fixture(params=[True, False], ids=["wrapped", "injected"])
def adapted(request: pytest.FixtureRequest) -> Adapted:
    pytest.importorskip("peft")
    return Adapted(request.param)


@pytest.mark.parametrize("change", CHANGES)
def test_a_prefix_of_one_adapter_is_refused_under_another(adapted: Adapted, change: str, tmp_path: Path):
    model = adapted.model
    cache = model(PREFIX).past_key_values
    want = model(QUESTION, past_key_values=copy.deepcopy(cache)).logits
    cache.save(tmp_path / "one")
    live = copy.deepcopy(cache)
    move, said = CHANGES[change]
    move(adapted)
    with pytest.raises(UnsupportedError, match=f"saved from another model.*{said}"):
        QAttnCache.load(tmp_path / "one", model=model)
    for tokens in (QUESTION, QUESTION[:, :1]) if change != "scaled" else (QUESTION,):
        with pytest.raises(UnsupportedError, match=f"before the model changed.*{said}"):
            model(tokens, past_key_values=live)
    with pytest.raises(UnsupportedError, match=said):
        live.save(tmp_path / "two")
    adapted.restore()
    for held in (live, QAttnCache.load(tmp_path / "one", model=model)):
        assert torch.equal(model(QUESTION, past_key_values=held).logits, want)


def test_what_an_adapter_that_is_off_does_is_not_asked(adapted: Adapted, tmp_path: Path):
    model = adapted.model
    switched_off(adapted)
    model(PREFIX).past_key_values.save(tmp_path / "off")
    for layer in adapted.layers():
        layer.enable_adapters(True)
    adapted.on("two")
    switched_off(adapted)
    assert int(QAttnCache.load(tmp_path / "off", model=model).get_seq_length()) == 100
    adapted.on("two")
    for layer in adapted.layers():
        layer.enable_adapters(True)
    model(PREFIX).past_key_values.save(tmp_path / "two")
    adapted.scale(3)  # of the other adapter
    assert int(QAttnCache.load(tmp_path / "two", model=model).get_seq_length()) == 100


def test_a_fresh_cache_takes_the_adapter_that_is_on(adapted: Adapted):
    model = adapted.model
    model(PREFIX)
    adapted.on("two")
    cache = model(PREFIX).past_key_values
    model(QUESTION, past_key_values=cache)
    cache.reset()
    adapted.on("one")
    model(PREFIX, past_key_values=cache)
    model(QUESTION[:, :1], past_key_values=cache)


def test_an_adapter_that_comes_later_is_noticed():
    peft = pytest.importorskip("peft")
    model = patch(tiny_llama(), "none")
    cache = model(PREFIX).past_key_values
    peft.inject_adapter_in_model(lora(), model, "late")
    model.eval()
    with pytest.raises(UnsupportedError, match="were off and are late by 2 here"):
        model(QUESTION, past_key_values=cache)
    for module in model.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.enable_adapters(False)
    model(QUESTION, past_key_values=cache)


# RoPE

LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64, "factor": 2.0,
}  # fmt: skip


def with_rope(rope: dict[str, Any], **changes: Any) -> PreTrainedModel:
    return patch(tiny_llama(rope_parameters=rope, max_position_embeddings=256, **changes), "none")


@pytest.mark.parametrize("prefix", [40, 100])  # short factors, and long ones
def test_long_rope_chooses_its_factors_by_the_call_and_not_by_the_model(prefix: int, tmp_path: Path):
    model = with_rope(LONG)
    cache = model(PREFIX[:, :prefix]).past_key_values
    cache.save(tmp_path / "x")
    want = model(QUESTION, past_key_values=cache).logits
    other = with_rope(LONG)
    for read in (10, 120):  # which leaves the other factors in the buffer
        other(random_ids(1, read, seed=4))
        loaded = QAttnCache.load(tmp_path / "x", model=other)
        assert torch.equal(other(QUESTION, past_key_values=loaded).logits, want)


@pytest.mark.parametrize("factor", ["long_factor", "short_factor"])
def test_other_factors_of_long_rope_are_refused(factor: str, tmp_path: Path):
    model = with_rope(LONG)
    cache = model(PREFIX).past_key_values
    cache.save(tmp_path / "x")
    with pytest.raises(UnsupportedError, match="rope_parameters"):
        QAttnCache.load(tmp_path / "x", model=with_rope({**LONG, factor: [2.0] * 8}))
    model.config.rope_parameters = {**LONG, factor: [2.0] * 8}
    with pytest.raises(UnsupportedError, match="other rope_parameters"):
        model(QUESTION, past_key_values=cache)


def later(model: PreTrainedModel) -> None:
    """Another RoPE in place of the model's, as libraries that extend contexts set it; the model's config stays."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model.model.rotary_emb = LlamaRotaryEmbedding(config)


def in_place(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.div_(4)


def stretched(model: PreTrainedModel) -> None:
    model.model.rotary_emb.attention_scaling = 1.2


@pytest.mark.parametrize("change", [later, in_place, stretched])
def test_a_rope_scaling_that_is_set_later_is_noticed(change: Callable[[PreTrainedModel], None], tmp_path: Path):
    model = patch(tiny_llama(), "none")
    cache = model(PREFIX).past_key_values
    cache.save(tmp_path / "x")
    change(model)
    with pytest.raises(UnsupportedError, match=r"another model.*RoPE frequencies rotary_emb\.inv_freq differ"):
        QAttnCache.load(tmp_path / "x", model=model)
    with pytest.raises(UnsupportedError, match=r"frequencies rotary_emb\.inv_freq"):
        model(QUESTION, past_key_values=cache)
    model(QUESTION)  # a fresh cache


def test_roundings_of_another_device_are_the_same_frequencies():
    model = patch(tiny_llama(), "none")
    before = identity(model)
    model.model.rotary_emb.inv_freq.mul_(1 + 2e-7)
    assert before["rope"] != identity(model)["rope"] and difference(before, identity(model)) is None


def test_dynamic_frequencies_are_those_before_any_length():
    model = with_rope({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    before = in_force(model)
    model(random_ids(1, 400))
    assert float(model.model.rotary_emb.inv_freq[-1]) != before.rope["rotary_emb.inv_freq"]["inv_freq"][-1]
    assert in_force(model) == before  # the buffer is not asked
