"""Split long prompts of `generate` into chunks, so that activations do not use the memory saved by the cache."""

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

PREFILL_CHUNK = 2**15  # tokens; a prompt up to this length is a single call with unchanged results

# Arguments that `generate` passes with a text-only prompt; Transformers can split all of them.
TEXT = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}
CUT_BY_TRANSFORMERS = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


def chunk_of(specs: Iterable[LayerSpec]) -> int | None:
    """Return the number of tokens per call of a long prompt; None runs the prompt as one call.

    Chunks suit methods that multiply prompts in INT8: they cost a few more roundings and no time. A method that attends
    to new tokens in bf16 or fp16 would lose accuracy, a lot at 2 bits. It would also lose the speed of PyTorch's SDPA.
    Unquantized windows lose nothing.
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
    """Return `prefill_chunk_size` for a `generate` call that sets none. Transformers feeds that many tokens of each row
    per call.

    Args:
        model: a patched model.
        cache: cache of the call.
        longest: maximum tokens of a row, used as the prompt's length if there is no 2-D mask.

    Returns:
        `chunk_of` the layers, or None to run the prompt as one call. None if the prompt is short; if Transformers would
        compile the chunks (`compile_config`, or a compiled step without capture); if Transformers cannot split the call
        (a cache with tokens, embeddings or images, assisted generation); if all hidden states are requested; if the
        RoPE frequencies depend on the length of a call; or if some layers are not packed, because linear attention may
        drop its state at a call of several tokens.
    """
    packed = [layer for layer in cache.layers if isinstance(layer, QAttnLayer) and not layer.is_initialized]
    chunk = chunk_of(layer.spec for layer in packed)
    mask = model_kwargs.get("attention_mask")
    tokens = longest if mask is None or mask.dim() != 2 else mask.shape[1]
    if chunk is None or tokens <= chunk or len(packed) < len(cache.packed):
        return None
    runner = model._qattn.runner
    whole = (
        cache.mixed,
        generation_mode not in CUT_BY_TRANSFORMERS,
        generation_config.is_assistant,
        generation_config.output_hidden_states,
        not {name for name, value in model_kwargs.items() if value is not None} <= TEXT,
        (runner.how == "compile" and not runner.captures) or generation_config.compile_config is not None,
        changing_rope(model) is not None,
    )
    return None if any(whole) else chunk
