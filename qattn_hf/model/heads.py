"""Read the numbers of heads and their dimension from a model's config."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PretrainedConfig


class HeadSizes(NamedTuple):
    """Query heads and KV heads of a layer, and the channels of a head as the cache holds it.

    Attributes:
        dim, v_dim: channels of K and of V. With latent attention (MLA), the RoPE part and the latent of the single
            head.
        latent: whether the layer has latent attention.
    """

    query: int
    kv: int
    dim: int
    v_dim: int
    latent: bool = False


def head_sizes(config: PretrainedConfig, layer: int) -> HeadSizes:
    """Return the head sizes of one layer of the model's text decoder."""
    text = config.get_text_config(decoder=True)
    own = text.per_layer_config[layer]
    query = own.num_attention_heads
    if rank := getattr(own, "kv_lora_rank", None):
        return HeadSizes(query, 1, own.qk_rope_head_dim, rank, latent=True)
    kv = getattr(own, "num_key_value_heads", None) or query
    dim = getattr(own, "head_dim", None) or text.hidden_size // query
    return HeadSizes(query, kv, dim, dim)
