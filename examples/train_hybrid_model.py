"""Train a small model of sliding windows and full attention with learned sinks, of gpt-oss's type.

    python examples/train_hybrid_model.py --text books.txt.xz --out hybrid_model

Text, tokenizer, tasks, schedule and scores are as in train_demo_model.py. Every second layer sees `WINDOW` tokens, so
only full layers recall earlier tokens.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from demo_eval import learned_sinks
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_model import SHARED, arguments, run
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM
from transformers.integrations.moe import ExpertsInterface

from qattn_hf.assets import demo_model_dir

WINDOW = 128
NAME = "trained_here"  # without a mask function of this name, transformers builds no mask


def make_config() -> GptOssConfig:
    """About 6.6 M parameters: 8 layers, 4 query heads, 2 KV heads of 64, two experts for every token."""
    return GptOssConfig(
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        **SHARED,
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
    """Causal attention with learned sinks through torch's attention, for rows without padding.

    A sink is an extra first key with a value of zero. Its score is in an extra channel, which is 1 in queries.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, T, D]`.
        s_aux: `[Hq]`, scores of the sinks.

    Returns:
        `[B, T, Hq, D]` and None.
    """
    dim, dtype = query.shape[-1], value.dtype
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    sink = F.pad((s_aux / scaling)[:, None, None], (dim, 7)).expand(len(query), -1, -1, -1)  # [B, Hq, 1, D + 8]
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 7))  # torch's fast kernels want multiples of 8
    key, value = F.pad(key, (0, 8)), F.pad(value, (0, 8))
    attend = causal if sliding_window is None else partial(windowed, window=sliding_window)
    out = attend(query.to(dtype), key.to(dtype), value, sink.to(dtype), scale=scaling)
    return out[..., :dim].transpose(1, 2).contiguous(), None


def causal(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention to all tokens before and `sink`, `[B, H, 1, D]`; the others are `[B, H, T, D]`. A query of zeros beside
    the sink keeps the causal mask square, which torch's fastest kernels want."""
    query, value = (F.pad(x, (0, 0, 1, 0)) for x in (query, value))
    out = F.scaled_dot_product_attention(query, torch.cat([sink, key], 2), value, is_causal=True, scale=scale)
    return out[:, :, 1:]


def windowed(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, window: int, scale: float) -> Tensor:
    """Attention to the last `window` tokens and `sink`: queries in parts of a window, each with its own part's keys and
    those of the part before."""
    tokens = query.shape[2]
    parts = -(-tokens // window)
    query, key, value = (
        F.pad(x, (0, 0, 0, parts * window - tokens)).unflatten(2, (parts, window)) for x in (query, key, value)
    )
    before = [F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1] for x in (key, value)]
    ahead = sink.unsqueeze(2).expand(-1, -1, parts, -1, -1)
    key = torch.cat([F.pad(ahead, (0, 0, 0, 7)), before[0], key], 3)  # [B, H, parts, 8 + 2 * window, D]
    value = F.pad(torch.cat([before[1], value], 3), (0, 0, 8, 0))
    at = torch.arange(parts * window, device=query.device).view(parts, window, 1)
    seen = (
        torch.arange(-window, window, device=query.device)
        + window * torch.arange(parts, device=query.device)[:, None, None]
    )
    visible = (seen >= 0) & (seen <= at) & (seen > at - window)  # [parts, window, 2 * window]
    visible = F.pad(F.pad(visible, (7, 0)), (1, 0), value=True).repeat(len(query), 1, 1)[:, None]
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
    return out.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]


def all_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert for every token, `[tokens, hidden]`: two of two are asked for, so none is gathered."""
    weights = torch.zeros_like(top_k_weights).scatter(1, top_k_index, top_k_weights)
    gate_up = hidden_states @ self.gate_up_proj + self.gate_up_proj_bias[:, None]  # [experts, tokens, 2 * intermediate]
    out = self._apply_gate(gate_up) @ self.down_proj + self.down_proj_bias[:, None]
    return (out * weights.T[..., None]).sum(0).to(hidden_states.dtype)


class TrainGptOss(nn.Module):
    """gpt-oss with the attention above, in the form that `train` takes."""

    compiled = False  # transformers' own forward
    measured = staticmethod(learned_sinks)

    def __init__(self, config: GptOssConfig):
        super().__init__()
        AttentionInterface.register(NAME, attention)
        ExpertsInterface.register(NAME, all_experts)
        self.config, self.terms = config, {"loss": 1.0}
        self.whole = GptOssForCausalLM._from_config(
            config, attn_implementation=NAME, experts_implementation=NAME
        ).train()
        self.model = self.whole.model

    def forward(self, ids: Tensor, queries: Tensor) -> tuple[Tensor]:
        """Next-token loss of ids `[B, T]`; `queries` belongs to the demo model's hinge."""
        logits = self.whole(ids[:, :-1], use_cache=False).logits
        return (F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()),)

    def final(self) -> GptOssForCausalLM:
        """The model of transformers with these weights."""
        self.whole.set_attn_implementation("eager")
        self.whole.set_experts_implementation("eager")
        return self.whole


if __name__ == "__main__":
    tokenizer = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
    run(arguments(__doc__, "hybrid_model", tokens=500e6, minutes=3.5), TrainGptOss, make_config(), tokenizer)
