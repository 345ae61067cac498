"""Hidden states in padding columns after a row's tokens, which text encoders of image models read.

These encoders take the hidden states of all columns without a mask. A padding query sees the tokens of its row, in
stock attention and here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models import FAMILIES, tiny
from transformers import GptOssConfig, MistralConfig, PretrainedConfig, PreTrainedModel

from qattn_hf import list_methods, patch
from qattn_hf.model._compat import CACHE

pytestmark = pytest.mark.usefixtures("no_grad")
LONG, SHORT = 60, 24  # columns of a prefill and of a call that reads the cache as steps do
SPANS = ((0, 20), (0, 5), (3, 15))  # first real column and count of each row


def batch(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, columns]`."""
    ids = torch.randint(1, 97, (len(SPANS), columns), generator=torch.Generator().manual_seed(3))
    mask = torch.zeros_like(ids)
    for row, (first, count) in enumerate(SPANS):
        mask[row, first : first + count] = 1
    return ids * mask, mask


def states(model: PreTrainedModel, columns: int) -> torch.Tensor:
    """Hidden states of all layers but the last, whose norm would hide a difference: `[B, columns, n]`."""
    ids, mask = batch(columns)
    return torch.cat(model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states[1:-1], 2)


def off(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Root mean square differences over the spread, of tokens and of padding after them."""
    difference, columns = (got - want).square().mean(-1).sqrt() / want.std(), torch.arange(got.shape[1])
    first, count = torch.tensor(SPANS).T[..., None]
    after = columns >= first + count
    return difference[(columns >= first) & ~after].mean().item(), difference[after].mean().item()


DEEPER: dict[str, Any] = {"num_hidden_layers": 3}


@pytest.mark.parametrize("columns", [LONG, SHORT])
@pytest.mark.parametrize("method", list_methods())
def test_padding_errs_as_tokens_do(method: str, columns: int):
    want = states(tiny(**DEEPER), columns)
    tokens, padding = off(states(patch(tiny(**DEEPER), method), columns), want)
    # a padding query reads more tokens than the average query of its row, whose first ones read a few exact ones
    assert padding < 2 * tokens + 1e-5


GPT_OSS = {"num_experts_per_tok": 1, "num_local_experts": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2}
GQA = {k: v for k, v in FAMILIES["llama"].to_dict().items() if k in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "pad_token_id", "initializer_range",
)}  # fmt: skip
OTHERS: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "absolute positions": (FAMILIES["opt"], {}),
    "soft cap": (FAMILIES["gemma2"], {}),
    "learned sinks": (GptOssConfig(**GQA, **GPT_OSS), {}),
    "packed windows": (MistralConfig(**GQA, sliding_window=45), {"sliding": "packed"}),
}


@pytest.mark.parametrize("columns", [LONG, SHORT])
@pytest.mark.parametrize("kind", OTHERS)
def test_padding_of_other_attention(kind: str, columns: int):
    """With a window, padding far after the tokens sees only some of them."""
    config, settings = OTHERS[kind]
    model = tiny(config)
    want = states(model, columns)
    tokens, padding = off(states(patch(model, "none", **settings), columns), want)
    assert tokens < 1e-5 and padding < 1e-5


def test_padding_of_a_later_call_reads_the_past():
    ids, mask = batch(LONG)[0] % 96 + 1, torch.ones(3, 40 + SHORT, dtype=torch.long)
    mask[0, -4:] = mask[1, -19:] = 0
    outs = []
    for model in (tiny(), patch(tiny(), "none")):
        cache = model(ids[:, :40]).past_key_values
        outs.append(model(ids[:, :SHORT], attention_mask=mask, **{CACHE: cache}).logits)
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)
    assert cache.layers[0].state["length"].tolist() == [60, 45, 64]
