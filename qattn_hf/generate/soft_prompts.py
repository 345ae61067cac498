"""Prompts that peft learns: what `generate` of a patched model does for prompt tuning, p-tuning and prefix tuning."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError

IN_THE_CACHE = ("PREFIX_TUNING", "CARTRIDGE")  # kinds that are keys and values, not embeddings


def soft_prompt(model: PreTrainedModel) -> str | None:
    """Kind of the prompt that peft puts before the model's tokens in this `generate`, `PROMPT_TUNING` for one; None
    without peft, or with weights alone (LoRA).

    Peft names it nowhere on the model: while its own `generate` runs, the model prepares inputs by a method of peft's.
    """
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    return str(config.peft_type.value) if config is not None and config.is_prompt_learning else None


def check_soft_prompt(model: PreTrainedModel, attention_mask: torch.Tensor | None) -> None:
    """Refuse a learned prompt of keys and values, and one before padding.

    Args:
        attention_mask: the mask of the text `[B, S]`, in which peft has no column yet.

    Raises:
        UnsupportedError: prefix tuning, or a cartridge; a row with padding, which would lie between real tokens.
    """
    kind = soft_prompt(model)
    if kind is not None and attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError(
            f"peft's {kind} puts its tokens before a row's padding, and a packed cache takes no padding between "
            "tokens: generate for prompts of one length together, or for one prompt at a time"
        )
    if kind in IN_THE_CACHE:
        raise UnsupportedError(
            f"peft's {kind} fills a cache of its own with learned keys and values, and a packed cache cannot take "
            "them: call unpatch(model), or learn the prompt by prompt tuning, p-tuning or LoRA"
        )
