"""Find the decoder inside a model."""

from __future__ import annotations

from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module that holds the decoder's layers, or the model itself if it has no separate decoder.

    `get_decoder` returns the attribute named `decoder`. In ModernBERT's decoder this is the output layer.
    """
    found = model.get_decoder()
    return found if isinstance(found, PreTrainedModel) else model.base_model
