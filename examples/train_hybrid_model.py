"""Train a small model of sliding windows and full attention with learned sinks, of gpt-oss's type.

    python examples/train_hybrid_model.py --text books.txt.xz --out hybrid_model

Text, tasks, schedule and scores are the demo model's (train_demo_model.py), and so is the tokenizer. Every second layer
sees `WINDOW` tokens, so what lies further back is recalled by full layers alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from demo_eval import learned_sinks
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_model import ROW_TOKENS, arguments, run
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM

from qattn_hf.assets import demo_model_dir

WINDOW = 128
NAME = "sinks_as_keys"  # without a mask function of this name, transformers builds no mask


def make_config() -> GptOssConfig:
    """About 6.6 M parameters: 8 layers, 4 query heads, 2 KV heads of 64, two experts for every token."""
    return GptOssConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        max_position_embeddings=ROW_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    s_aux: Tensor,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention with learned sinks by torch's own, for rows without padding.

    A sink is a key more, ahead of all, whose value is zero; one more channel, which is 1 in queries, holds its score.

    Args:
        query: `[B, Hq, T, D]`. key, value: `[B, Hkv, T, D]`. s_aux: `[Hq]`, scores of the sinks.

    Returns:
        `[B, T, Hq, D]` and None.
    """
    tokens, dim = query.shape[2:]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    at = torch.arange(tokens, device=query.device)
    back = at[:, None] - at
    visible = F.pad((back >= 0) & (back < (sliding_window or tokens)), (1, 0), value=True)  # [T, 1 + T]
    sink = F.pad((s_aux / scaling)[:, None, None], (dim, 7)).expand(len(query), -1, -1, -1)  # [B, Hq, 1, D + 8]
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 7))  # torch's fast kernels want multiples of 8
    key, value = torch.cat([sink.to(key.dtype), F.pad(key, (0, 8))], 2), F.pad(value, (0, 8, 1, 0))
    query, key, value = (x.to(value.dtype) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return out[..., :dim].transpose(1, 2).contiguous(), None


class TrainGptOss(nn.Module):
    """gpt-oss with the attention above, in the form that `train` takes."""

    compiled = False  # the experts' loop asks for tokens, which breaks a graph
    measured = staticmethod(learned_sinks)

    def __init__(self, config: GptOssConfig):
        super().__init__()
        AttentionInterface.register(NAME, attention)
        self.config, self.terms = config, {"loss": 1.0}
        self.whole = GptOssForCausalLM._from_config(config, attn_implementation=NAME).train()
        self.model = self.whole.model

    def forward(self, ids: Tensor, queries: Tensor) -> tuple[Tensor]:
        """Next-token loss of ids `[B, T]`; `queries` belongs to the demo model's hinge."""
        logits = self.whole(ids[:, :-1], use_cache=False).logits
        return (F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()),)

    def final(self) -> GptOssForCausalLM:
        """The model of transformers with these weights."""
        self.whole.set_attn_implementation("eager")
        return self.whole


if __name__ == "__main__":
    tokenizer = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
    run(arguments(__doc__, "hybrid_model", tokens=500e6, minutes=3.5), TrainGptOss, make_config(), tokenizer)
