"""Attach a patch to a model, and `generate` of a patched model in a training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from qattn_hf.attention import model_constants
from qattn_hf.generate.patched import Patched, patch_of
from qattn_hf.model.bound_method import BoundMethod
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.selection import own_config, restore, select, selected
from qattn_hf.model.supported_models import check_selected
from qattn_hf.patching import hooks
from qattn_hf.patching.training import select_attention
from qattn_hf.saved.weights import weights_of


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
    patched.packed_implementations, patched.packs_now = selected(model), True
    hooks.install(model, patched)
    if hasattr(type(model), "generate"):
        model.generate = BoundMethod(generate, model)
        model.generate_batch = BoundMethod(generate_batch, model)


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
        select_attention(model, packed=True)
        yield
    finally:
        for module in training:
            module.training = True


def _renew_constants(model: PreTrainedModel) -> None:
    """Compute a patch's constants again, if a pass of the model gave them and its weights have changed."""
    patched = patch_of(model)
    if patched.weights is None or patched.weights == (now := weights_of(decoder_of(model))):
        return
    detach(model)
    try:
        patched.constants = model_constants.constants(model, patched.specs)
        patched.weights = now
    finally:
        attach(model, patched)


def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Override of `generate`: pack also in training mode, which is restored afterwards."""
    kind: Any = type(model)
    with rollout(model):
        return kind.generate(model, *args, **kwargs)


def generate_batch(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Override of `generate_batch`: pack also in training mode, which is restored afterwards."""
    kind: Any = type(model)
    with rollout(model):
        return kind.generate_batch(model, *args, **kwargs)
