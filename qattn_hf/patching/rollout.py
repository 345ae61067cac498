"""Attach a patch to a model, and `generate` of a patched model in a training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from qattn_hf.attention import model_constants
from qattn_hf.generate.patched import Patched, patch_of
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.selection import own_config, restore, select, selected
from qattn_hf.model.supported_models import check_selected
from qattn_hf.patching import hooks
from qattn_hf.patching.training import select_attention
from qattn_hf.saved.weights import trained, weights_of


def attach(model: PreTrainedModel, patched: Patched) -> None:
    """Select packed attention on an unpatched model, and install hooks and overrides of methods.

    Raises:
        UnsupportedError: a module ignores the model's config. The model is unchanged.
    """
    name = patched.register()
    own_config(model)
    before = patched.attn_implementations = selected(model)
    try:
        select(model, name)
        check_selected(model, name)
    except Exception:  # restore the model after any error, and raise it again
        restore(before)
        raise
    patched.packed_implementations, patched.unpacked_call = selected(model), None
    hooks.install(model, patched)
    pack_rollouts()


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`."""
    before = patch_of(model).attn_implementations
    hooks.uninstall(model)
    restore(before)


@contextmanager
def rollout(model: PreTrainedModel) -> Iterator[None]:
    """Context in eval mode with packed attention. Modules in training mode return to it afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        _renew_constants(model)
        select_attention(model, None)
        yield
    finally:
        for module in training:
            module.training = True


def _renew_constants(model: PreTrainedModel) -> None:
    """Compute a patch's constants again, if a pass of the model gave them and its weights have changed."""
    patched = patch_of(model)
    if patched.weights is None or not trained(patched.weights, now := weights_of(decoder_of(model))):
        return
    detach(model)
    try:
        patched.constants = model_constants.constants(model, patched.specs)
        patched.weights = now
    finally:
        attach(model, patched)


@functools.cache
def pack_rollouts() -> None:
    """Let `generate` and `generate_batch` of patched models run in `rollout`.

    This replaces two methods of Transformers' class, once per process. The replacements act like the originals for
    all other models. An override on the model would hold it weakly, and `patch(load()).generate(...)` would free it.
    """
    GenerationMixin.generate = _in_rollout(GenerationMixin.generate)
    GenerationMixin.generate_batch = _in_rollout(GenerationMixin.generate_batch)


def _in_rollout(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(model, "_qattn"):
            return original(model, *args, **kwargs)
        with rollout(model):
            return original(model, *args, **kwargs)

    return replacement
