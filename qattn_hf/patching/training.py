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


def trains(module: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Return whether a call attends as before `patch`: in training mode, or with gradients and without a cache.

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
        return True
    if not torch.is_grad_enabled() or kwargs.get(CACHE) is not None:
        return False
    asked = kwargs.get("use_cache")
    return not (module.config.get_text_config(decoder=True).use_cache if asked is None else asked)


def select_attention(module: PreTrainedModel, packed: bool) -> None:
    """Make the configs of a patched model name the packed attention, or the attention from before `patch`."""
    patched = patch_of(module)
    if packed != patched.packs_now:
        restore(patched.packed_implementations if packed else patched.attn_implementations)
        (latent.install if packed else latent.uninstall)(module)
        patched.packs_now = packed
