"""Read from a config how many positions a model has. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# With these types of rope scaling, a factor multiplies the positions. Other types, such as `llama3` and `longrope`,
# state all positions in `max_position_embeddings`. So do configs with parameters for each kind of layer, such as Gemma
# 3's.
MULTIPLIED = ("linear", "dynamic", "yarn")


def positions_of(config: PretrainedConfig) -> int | None:
    """Return the number of positions of a model's context, with rope scaling. None if the config has no bound.

    Some configs with a linear or dynamic factor already state the product. The result is then too large by this factor.
    No context that the model supports is ever reported as too long.
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
    """Return a message if a context of `tokens` exceeds the model's positions, else None."""
    if positions is None or tokens <= positions:
        return None
    return (
        f"{tokens} tokens are more than the {positions} positions that the model supports: use fewer, or set rope "
        "scaling in its config"
    )
