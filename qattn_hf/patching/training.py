"""Calls of a patched model that train: they attend as before `patch`.

A call selects the attention that it needs in the model's configs, and leaves it selected. Gradient checkpointing calls
layers again in the backward pass, after the call has ended, and they must find the same attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous.cache import PagedCache
from qattn_hf.generate.patched import patch_of
from qattn_hf.model import latent
from qattn_hf.model._compat import CACHE
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.selection import restore


def why_unpacked(module: PreTrainedModel, kwargs: dict[str, Any]) -> str | None:
    """Return why a call attends as before `patch`: training mode, or gradients without a cache. None if it packs.

    Args:
        module: a patched model, or its decoder.
        kwargs: the call's arguments, with the cache named `CACHE`.

    Raises:
        UnsupportedError: training mode with a packed cache, or in only one of the model and its decoder.
    """
    if module.training:
        if isinstance(kwargs.get(CACHE), QAttnCache) or isinstance(kwargs.get("cache"), PagedCache):
            raise UnsupportedError(
                f"a call in training mode attends without a packed cache: leave {CACHE} out, or call model.eval()"
            )
        if not decoder_of(module).training:
            raise UnsupportedError("the model is in training mode and its decoder is not: call model.train()")
        return "the model is in training mode"
    if not torch.is_grad_enabled() or kwargs.get(CACHE) is not None:
        return None
    asked = kwargs.get("use_cache")
    cached = module.config.get_text_config(decoder=True).use_cache if asked is None else asked
    return None if cached else "it recorded gradients with use_cache=False"


def select_attention(module: PreTrainedModel, unpacked: str | None) -> None:
    """Make the configs of a patched model name the packed attention, or the attention from before `patch`.

    Args:
        module: a patched model, or its decoder.
        unpacked: why the next call attends as before `patch`, for the report; None if it packs.
    """
    patched, packed = patch_of(module), unpacked is None
    if packed != patched.packs_now:
        restore(patched.packed_implementations if packed else patched.attn_implementations)
        (latent.install if packed else latent.uninstall)(module)
    patched.unpacked_call = unpacked
