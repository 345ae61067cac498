"""Scores that say which tokens of a prompt to keep in a packed cache, from its keys and from the last queries.

with last_queries(model) as queries:
    cache = model(**inputs, use_cache=True).past_key_values
cache.keep(best(observed_attention(cache, queries), share=0.5))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from qattn_hf import QAttnCache, UnsupportedError

WINDOW = 32  # last tokens of a prompt: their queries give the scores, and they are always kept
SMOOTHED = 7  # neighbours that share a score, so that words stay whole
# of each layer, `[B, Hkv, columns]`, larger is better; None for layers that keep what they have, such as windows
Scores = list[torch.Tensor | None]


def all_keys(cache: QAttnCache) -> list[torch.Tensor | None]:
    """Return the keys of each layer, `[B, Hkv, columns, D]`; None for layers that cannot be pruned.

    Raises:
        UnsupportedError: no layer can be pruned.
    """
    found: list[torch.Tensor | None] = []
    for layer in range(len(cache.layers)):
        try:
            found.append(cache.read(layer)[0])
        except UnsupportedError:
            if layer == len(cache.layers) - 1 and not any(keys is not None for keys in found):
                raise
            found.append(None)
    return found


def key_norms(cache: QAttnCache) -> Scores:
    """Prefer small keys, which get most attention (Devoto et al., arXiv 2406.11430)."""
    return [None if keys is None else -keys.norm(dim=-1) for keys in all_keys(cache)]


def observed_attention(cache: QAttnCache, queries: list[torch.Tensor]) -> Scores:
    """Prefer tokens that the last queries attend to (SnapKV, Li et al., arXiv 2404.14469)."""
    scores: Scores = []
    for keys, query in zip(all_keys(cache), queries, strict=True):
        if keys is None:
            scores.append(None)
            continue
        grouped = query.float().unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, WINDOW, D]
        products = grouped @ keys[:, :, None].mT
        hidden = torch.ones(products.shape[-2:], dtype=torch.bool).triu(products.shape[-1] - products.shape[-2] + 1)
        weights = products.masked_fill(hidden.to(keys.device), -torch.inf).softmax(-1).mean((2, 3))
        scores.append(torch.nn.functional.avg_pool1d(weights, SMOOTHED, 1, SMOOTHED // 2))
    return scores


def best(scores: Scores, share: float) -> list[torch.Tensor | None]:
    """Return the masks for `cache.keep`: in each head this share of the columns, the last `WINDOW` among them."""
    masks: list[torch.Tensor | None] = []
    for of_layer in scores:
        if of_layer is None:
            masks.append(None)
            continue
        of_layer = of_layer.clone()
        of_layer[..., -WINDOW:] = torch.inf
        kept = of_layer.topk(max(WINDOW, round(share * of_layer.shape[-1]))).indices
        masks.append(torch.zeros_like(of_layer, dtype=torch.bool).scatter(-1, kept, True))
    return masks


@contextmanager
def last_queries(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collect the last queries `[B, Hq, WINDOW, D]` of each layer in a call, scaled. Attention must be Llama's, or
    Gemma 3's and Qwen3's with its norm of queries."""
    queries: list[torch.Tensor] = []

    def collect(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = kwargs["hidden_states"][:, -WINDOW:]
        cos, sin = (x[:, None, -WINDOW:] for x in kwargs["position_embeddings"])
        query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        query = module.q_norm(query) if hasattr(module, "q_norm") else query
        queries.append((query * cos + rotate_half(query) * sin) * module.scaling)

    hooks = [
        layer.self_attn.register_forward_pre_hook(collect, with_kwargs=True) for layer in model.get_decoder().layers
    ]
    try:
        yield queries
    finally:
        for hook in hooks:
            hook.remove()
