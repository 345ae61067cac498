"""The tokens that a probe reads: a built-in text, or tokens that the model samples if it has no tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.assets.prose import TEXT
from qattn_hf.model.device import device_of
from qattn_hf.model.positions import positions_of

TOKENS = 1200  # most tokens of the row
PASSES = 8  # calls of a model that samples tokens
SEED = 0


def tokens_of(model: PreTrainedModel) -> tuple[torch.Tensor, str]:
    """Return the tokens of the probe, int64 `[1, T]` on the CPU, at most `TOKENS`, and a description.

    The tokenizer comes from the folder or local hub cache that the model was loaded from. Without a tokenizer the model
    samples tokens. Uniformly random tokens would rank settings differently than texts do.
    """
    tokens = min(TOKENS, positions_of(model.config) or TOKENS)
    ids = _of_text(model)
    if ids is not None:
        return ids[:, :tokens], f"{min(tokens, ids.shape[1])} tokens of a built-in text"
    return sampled(model, tokens), f"{tokens} tokens that the model sampled, since its folder has no tokenizer"


def _of_text(model: PreTrainedModel) -> torch.Tensor | None:
    """Return the text's tokens, int64 `[1, T]`, or None if the model's tokenizer is not on this machine."""
    from transformers import AutoTokenizer

    name = model.config.name_or_path
    if not name:
        return None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        ids = torch.tensor([tokenizer(TEXT, verbose=False).input_ids], device="cpu")
    except Exception:  # a folder may raise anything; the report says that there was no tokenizer
        return None
    if ids.shape[1] < 2 or int(ids.max()) >= model.config.get_text_config(decoder=True).vocab_size:
        return None  # the tokenizer of another model
    return ids


@torch.no_grad()
def sampled(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    """Sample tokens from a model: int64 `[1, tokens]`.

    The row starts with random tokens. Each pass draws every second token anew, from the model's prediction given the
    tokens before it. One call draws them all, so few passes suffice."""
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (1, tokens), generator=generator, device="cpu")
    for turn in range(PASSES):
        logits = model(ids.to(device_of(model)), use_cache=False).logits[0, :-1].float().cpu()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        first = 1 + turn % 2  # of two neighbours one stays, and the other is drawn given that one
        ids[0, first::2] = drawn[first - 1 :: 2]
    return ids
