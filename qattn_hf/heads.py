"""Numbers of heads and their dimension, from a model's config."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PretrainedConfig


class HeadSizes(NamedTuple):
    """Query heads and KV heads of a layer, and the dimension of each head."""

    query: int
    kv: int
    dim: int


def head_sizes(config: PretrainedConfig, layer: int) -> HeadSizes:
    """Those of one layer of the text decoder of a model with this config."""
    text = config.get_text_config(decoder=True)
    own = text.per_layer_config[layer]
    query = own.num_attention_heads
    kv = getattr(own, "num_key_value_heads", None) or query
    return HeadSizes(query, kv, getattr(own, "head_dim", None) or text.hidden_size // query)
