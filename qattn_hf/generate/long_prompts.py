"""Long prompts of `generate` in chunks, so that their activations do not fill the memory that the cache saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.generate.cuda_graph.capture import changing_rope
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.model._compat import CACHE
from qattn_hf.model.layer_kinds import of_method
from qattn_kernels.layer.spec import LayerSpec

PREFILL_CHUNK = 2**15  # tokens; a prompt of no more is one call, with the numbers of one call

# What `generate` passes to a model with a prompt of text alone, all of which transformers cuts.
TEXT = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}
CUT_BY_TRANSFORMERS = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


def chunk_of(specs: Iterable[LayerSpec]) -> int | None:
    """Tokens of a call of a long prompt, by the settings of the layers; None: it is one call, however long.

    Where prompts are multiplied in INT8, cutting them costs roundings more and no time. A method that attends to new
    tokens in the model's precision would lose that, with 2 bits a lot, and PyTorch's SDPA with it. Unquantized windows
    lose nothing.
    """
    return PREFILL_CHUNK if all(spec.compute.prefill == "int8" for spec in specs if of_method(spec)) else None


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
        model: a patched model. cache: that of the call. longest: tokens that a row may reach, which the prompt is
            taken to have where no 2-D mask says otherwise.

    Returns:
        `chunk_of` the layers; None where the prompt stays one call: it is short, transformers would compile the chunks
        (`compile_config`, a compiled step that is not captured) or cannot cut the call (a cache with tokens, embeddings
        or images, assisted generation), all hidden states are asked for, the frequencies of the model's RoPE depend on
        the length of a call, or some layers are not packed: linear attention may leave out what came before a call of
        several tokens.
    """
    packed = [layer for layer in cache.layers if isinstance(layer, QAttnLayer) and not layer.is_initialized]
    chunk = chunk_of(layer.spec for layer in packed)
    mask = model_kwargs.get("attention_mask")
    tokens = longest if mask is None or mask.dim() != 2 else mask.shape[1]
    if chunk is None or tokens <= chunk or len(packed) < len(cache.packed):
        return None
    compiled = model._qattn.decode == "compile" and model._qattn.decode_reason is not None
    whole = (
        cache.mixed,
        generation_mode not in CUT_BY_TRANSFORMERS,
        generation_config.is_assistant,
        generation_config.output_hidden_states,
        not {name for name, value in model_kwargs.items() if value is not None} <= TEXT,
        compiled or generation_config.compile_config is not None,
        changing_rope(model) is not None,
    )
    return None if any(whole) else chunk
