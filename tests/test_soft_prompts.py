"""Prompts that peft learns before a patched model: as in stock, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

from qattn_hf import UnsupportedError, patch, unpatch

pytestmark = pytest.mark.usefixtures("no_grad")
VIRTUAL = 7
LEARNED: dict[str, Any] = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=16),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
}


def prompted(kind: str) -> PeftModel:
    model = get_peft_model(tiny_llama(initializer_range=0.15), LEARNED[kind]).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.normal_(0, 0.5)
    return model


def answer(model: PeftModel, tokens: int, padding: int = 0) -> torch.Tensor:
    ids = random_ids(2, tokens)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=10)[:, tokens:]


@pytest.mark.parametrize("tokens", [40, 115])  # with the learned tokens, the longer text outgrows what generate plans
@pytest.mark.parametrize("kind", ["prompt tuning", "p-tuning"])
def test_answers_are_those_of_stock(kind: str, tokens: int):
    want, model = answer(prompted(kind), tokens), prompted(kind)
    patch(model.get_base_model(), "none")
    assert torch.equal(answer(model, tokens), want)
    plain = random_ids(1, 40)  # the model itself has no prompt, and makes masks as ever
    stock = tiny_llama(initializer_range=0.15).generate(plain, do_sample=False, max_new_tokens=5)
    assert torch.equal(model.get_base_model().generate(plain, do_sample=False, max_new_tokens=5), stock)


def test_a_prefix_of_keys_and_values_is_refused():
    want, model = answer(prompted("prefix tuning"), 40), prompted("prefix tuning")
    base = patch(model.get_base_model(), "none")
    with pytest.raises(UnsupportedError, match=r"PREFIX_TUNING fills its own cache.*unpatch\(model\)"):
        answer(model, 40)
    unpatch(base)
    assert torch.equal(answer(model, 40), want)


def test_padding_after_a_learned_prompt_is_refused():
    model = prompted("prompt tuning")
    patch(model.get_base_model(), "none")
    with pytest.raises(UnsupportedError, match=r"PROMPT_TUNING puts its tokens before a row's padding.*one length"):
        answer(model, 40, padding=3)
