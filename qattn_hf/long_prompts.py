"""Long prompts of `generate` in chunks, so that their activations do not fill the memory that the cache saves."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from qattn_hf.cache import QAttnCache
from qattn_hf.cuda_graph.capture import changing_rope
from qattn_hf.layer import QAttnLayer

PREFILL_CHUNK = 2**15  # tokens; a prompt of no more is one call, with the numbers of one call

# What `generate` passes to a model with a prompt of text alone, all of which transformers cuts.
TEXT = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
CUT_BY_TRANSFORMERS = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


def prefill_chunk(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    cache: QAttnCache,
    longest: int,
) -> int | None:
    """`prefill_chunk_size` of a call of `generate` that names none: transformers feeds the prompt in calls of so many
    tokens of each row.

    Args:
        model: a patched model. cache: that of the call. longest: tokens that a row may reach.

    Returns:
        `PREFILL_CHUNK`; None where the prompt stays one call: it is short, transformers would compile the chunks
        (`decode="compile"`) or cannot cut the call (a cache with tokens, embeddings or images, assisted generation),
        all hidden states are asked for, the frequencies of the model's RoPE depend on the length of a call, or some
        layers are not packed: linear attention may leave out what came before a call of several tokens.
    """
    whole = (
        longest <= PREFILL_CHUNK
        or generation_mode not in CUT_BY_TRANSFORMERS
        or generation_config.is_assistant
        or generation_config.output_hidden_states
        or any(not isinstance(layer, QAttnLayer) or layer.is_initialized for layer in cache.layers)
        or not {name for name, value in model_kwargs.items() if value is not None} <= TEXT
        or model._qattn.decode == "compile"
        or generation_config.compile_config is not None
        or changing_rope(model) is not None
    )
    return None if whole else PREFILL_CHUNK
