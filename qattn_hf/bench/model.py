"""The models that `generate` is measured with, and the same model without attention: the floor under every cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

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
    """A Llama of these sizes with random weights, made on the device itself."""
    config = LlamaConfig(**sizes, tie_word_embeddings=False, max_position_embeddings=131072)
    with torch.device(device):
        return _ready(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa"))


def load_model(source: str, device: torch.device) -> PreTrainedModel:
    """A model from a folder or the hub, in its own precision."""
    return _ready(AutoModelForCausalLM.from_pretrained(source, dtype="auto", attn_implementation="sdpa").to(device))


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    """Nothing but the number of new tokens may end an answer, else ways would be timed over different lengths."""
    generation: Any = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    return model.eval()


def attention_of_the_floor(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """In place of attention: the query, as if it were the answer."""
    return query.transpose(1, 2).contiguous(), None


def register_floor() -> None:
    """Make `FLOOR` known to transformers."""
    AttentionInterface.register(FLOOR, attention_of_the_floor)


class CountingLayer(CacheLayerMixin):
    """Counts tokens and keeps none."""

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
    """A cache for the floor."""
    return Cache(layers=[CountingLayer() for _ in range(model.config.num_hidden_layers)])


def kv_bytes(cache: Any) -> int:
    """Bytes of the keys and values of a stock cache, from its tensors; of the floor's cache, 0."""
    kept = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(t.nbytes for t in kept if t is not None)
