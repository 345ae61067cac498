"""Train a small model whose keys have large biases, of Qwen2's type, with more heads than the demo model.

    python examples/train_biased_model.py --text books.txt.xz --out biased_model

Text, tokenizer, tasks, schedule and scores are as in train_demo_model.py. In Qwen2 models, biases make a few key
channels far larger than the others, the worst case for scales per token or block. A small model does not develop such
biases within minutes, so they start large, in channels that RoPE hardly turns, and are trained from there.
"""

from __future__ import annotations

import torch
from demo_eval import key_biases
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_model import SHARED, Attention, TrainLlama, arguments, run
from transformers import Qwen2Config, Qwen2ForCausalLM

from qattn_hf.assets import demo_model_dir

BIASED = 2  # channels of each KV head, among the quarter that RoPE turns least
BIAS = 10.0  # of these channels at first; a key's other channels are about 1 in the end


def make_config() -> Qwen2Config:
    """About 14 M parameters: 6 layers, 12 query heads, 6 KV heads of 64, tied embeddings."""
    return Qwen2Config(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        rms_norm_eps=1e-5,
        **SHARED,
    )


def first_biases(heads: int, head_dim: int) -> Tensor:
    """Biases of keys to begin with, fp32 `[heads * head_dim]`: `BIASED` channels of each head are `BIAS` or `-BIAS`."""
    slow = torch.cat([torch.arange(head_dim * part // 8, head_dim * (part + 1) // 8) for part in (3, 7)])
    out = torch.zeros(heads, head_dim)
    for head in out:
        head[slow[torch.randperm(len(slow))[:BIASED]]] = BIAS * torch.randint(2, (BIASED,)).float().mul(2).sub(1)
    return out.flatten()


class BiasedAttention(Attention):
    """Attention whose queries, keys and values have biases."""

    biased = True

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.k_proj.bias.copy_(first_biases(config.num_key_value_heads, config.head_dim))


class TrainQwen2(TrainLlama):
    """Qwen2 with biases as above; no hinge, since a sink's small key cannot be had beside large biases."""

    attention, final_class = BiasedAttention, Qwen2ForCausalLM
    hinge_weight = 0.0
    measured = staticmethod(key_biases)


if __name__ == "__main__":
    tokenizer = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
    run(arguments(__doc__, "biased_model", tokens=500e6, minutes=4.0), TrainQwen2, make_config(), tokenizer)
