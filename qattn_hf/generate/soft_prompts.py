"""Prompts learned by peft in `generate` of a patched model: prompt tuning, p-tuning and prefix tuning."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError

IN_THE_CACHE = ("PREFIX_TUNING", "CARTRIDGE")  # kinds made of keys and values instead of embeddings


def soft_prompt(model: PreTrainedModel) -> str | None:
    """Return the kind of prompt that peft prepends in this `generate`, such as `PROMPT_TUNING`.

    None without peft, or for adapters that only change weights (LoRA). Peft does not record the kind on the model.
    While peft's `generate` runs, a method of peft prepares the model's inputs, and that method leads to the kind.
    """
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    return str(config.peft_type.value) if config is not None and config.is_prompt_learning else None


def check_soft_prompt(model: PreTrainedModel, attention_mask: torch.Tensor | None) -> None:
    """Refuse a learned prompt of keys and values, and a learned prompt before padding.

    Args:
        attention_mask: mask of the text `[B, S]`, without peft's columns.

    Raises:
        UnsupportedError: prefix tuning or a cartridge; or a padded row, whose padding would be between real tokens.
    """
    kind = soft_prompt(model)
    if kind is not None and attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError(
            f"peft's {kind} puts its tokens before a row's padding, and a packed cache takes no padding between "
            "tokens: generate for prompts of one length together, or for one prompt at a time"
        )
    if kind in IN_THE_CACHE:
        raise UnsupportedError(
            f"peft's {kind} fills its own cache with learned keys and values, which a packed cache cannot take: call "
            "unpatch(model), or use prompt tuning, p-tuning or LoRA"
        )
