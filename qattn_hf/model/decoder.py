"""The decoder inside a model."""

from __future__ import annotations

from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module that holds the decoder's layers; the model itself where it has no other.

    `get_decoder` gives what is called `decoder`, which in ModernBERT's decoder is the output layer.
    """
    found = model.get_decoder()
    return found if isinstance(found, PreTrainedModel) else model.base_model
