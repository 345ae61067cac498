"""Helpers for the tests of refusals: small models, and checks that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from qattn_hf import QAttnCache, patch

# fmt: off
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
}
# fmt: on
GQA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = 70
IDS = torch.randint(1, 101, (2, TOKENS), generator=torch.Generator().manual_seed(0))
ONE, LONGER = IDS[:1], torch.cat([IDS, IDS[:, :2]], 1)
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def tiny(family: str = "llama", kind: Any = AutoModelForCausalLM, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, **(GQA | sizes if family == "llama" else sizes)}
    return kind.from_config(AutoConfig.for_model(family, **sizes)).eval()


def llava() -> PreTrainedModel:
    """A Llama inside a model with a vision tower."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**GQA), image_token_index=100)
    return LlavaForConditionalGeneration(config).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(ONE, **({"decoder_input_ids": ONE} if model.config.is_encoder_decoder else {})).logits


def traces(model: PreTrainedModel) -> list[Any]:
    """Return everything that a patch adds to a model."""
    return [model.config._attn_implementation, *((set(vars(m)), len(m._forward_pre_hooks)) for m in model.modules())]


def state(cache: QAttnCache) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, (tensor, _) in cache.state_tensors().items()}


def same(before: dict[str, torch.Tensor], cache: QAttnCache) -> bool:
    now = cache.state_tensors()
    return before.keys() == now.keys() and all(torch.equal(before[name], tensor) for name, (tensor, _) in now.items())


def refused(call: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    """`call` raises `error`, in one line with all `parts`."""
    with pytest.raises(error) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
    assert "\n" not in str(caught.value)


def refused_patch(model: PreTrainedModel, error: type[Exception], *parts: str, **how: Any) -> None:
    """`patch(model, **how)` raises, and the model is the stock model it was."""
    want, before = logits(model), traces(model)
    refused(lambda: patch(model, **how), error, *parts)
    assert traces(model) == before
    assert torch.equal(logits(model), want)
