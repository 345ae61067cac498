"""Models for the benchmark of `generate`, and the same model without attention: a lower bound for every cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report

FLOOR = "qattn_bench_floor"
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
QUICK = {**LLAMA_8B, "num_hidden_layers": 4}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
}


def random_model(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Make a Llama with random weights on the device.

    Args:
        sizes: arguments of `LlamaConfig`, such as `hidden_size` and `num_hidden_layers`.
        device, dtype: device and dtype of the weights.
    """
    config = LlamaConfig(**sizes, tie_word_embeddings=False, max_position_embeddings=131072)
    return _random(config, device, dtype)


def model_of_config(source: str, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make a model with random weights on the device, from its config alone.

    Args:
        source: a folder, a config file or a hub name.
        device: device of the weights.
        dtype: dtype of the weights. None uses the config's dtype, or float32 if it has none.
    """
    config = AutoConfig.from_pretrained(source)
    return _random(config, device, dtype or config.dtype or torch.float32)


def _random(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device(device):
        return ready(AutoModelForCausalLM.from_config(config, dtype=dtype))  # attends by SDPA if the model supports it


def load_model(source: str, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model from a folder or the hub for benchmarks, without end tokens. A `dtype` of None keeps its dtype."""
    made = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", attn_implementation="sdpa")
    return ready(made.to(device))


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Remove end tokens, so that every way generates the same number of tokens."""
    generation: Any = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    return model.eval()


def attention_of_the_floor(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention function of the floor: returns the query `[B, Hq, T, D]` as output."""
    return query.transpose(1, 2).contiguous(), None


def register_floor() -> None:
    """Register the floor's attention with Transformers as `FLOOR`."""
    AttentionInterface.register(FLOOR, attention_of_the_floor)


class CountingLayer(CacheLayerMixin):
    """Cache layer of the floor: counts tokens and stores nothing."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.tokens += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def counting_cache(model: PreTrainedModel) -> Cache:
    """Make a cache for the floor, which stores nothing."""
    return Cache(layers=[CountingLayer() for _ in range(model.config.num_hidden_layers)])


def kv_bytes(cache: Any) -> int:
    """Return the bytes of keys and values: of a stock cache counted from its tensors. The floor's cache has 0."""
    if isinstance(cache, QAttnCache):
        return report(cache).to_dict()["kv_bytes"]
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(t.nbytes for t in tensors if t is not None)
