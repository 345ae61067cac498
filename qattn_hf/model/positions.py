"""How many positions a model has, from its config. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Types of rope scaling whose factor multiplies the positions. The others, such as `llama3` and `longrope`, state all
# positions in `max_position_embeddings`; so do configs with parameters for each kind of layer, such as Gemma 3's.
MULTIPLIED = ("linear", "dynamic", "yarn")


def positions_of(config: PretrainedConfig) -> int | None:
    """Positions that a model's context may have, rope scaling counted; None where the config names no bound.

    Where a config with a linear or dynamic factor states the product already, the result is the factor too large: it
    then reports too few contexts, never a context that the model can take.
    """
    text = config.get_text_config(decoder=True)
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int):
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") not in MULTIPLIED:
        return stated
    trained = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(trained * (rope.get("factor") or 1)))


def beyond(tokens: int, positions: int | None) -> str | None:
    """Say that a context of `tokens` is longer than the model's positions; None where it is not."""
    if positions is None or tokens <= positions:
        return None
    return (
        f"{tokens} tokens are beyond the model's {positions} positions, for which alone it was made: take fewer, or "
        "rope scaling in its config"
    )
