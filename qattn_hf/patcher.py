"""`patch` and `unpatch`: select packed attention on one model instance, and put everything back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf import _compat, hooks
from qattn_hf.capture import resolve_decode
from qattn_hf.errors import QAttnError
from qattn_hf.over_cache import STEPS
from qattn_hf.recipe import Recipe, find_recipe
from qattn_hf.share import share_of
from qattn_hf.support import check_model, check_selected

Model = TypeVar("Model", bound=PreTrainedModel)


def patch(
    model: Model, method: str | None = None, *, recipe: str | Path | Recipe | None = None, **settings: Any
) -> Model:
    """Let a model generate with a packed KV cache, or with this package's attention over transformers' own caches.

    Touches this instance only; importing the package changes nothing, and a model built from the same config object
    stays as it is. A second patch replaces the first.

    Args:
        model: a decoder of transformers, on the device where it will run, in eval mode when it runs.
        method: a method's name (`list_methods()`), default `turbo`.
        recipe: a YAML file, the name of a recipe of this package, or a `Recipe`.
        settings: settings of the method, by the YAML's names, and `layers`, what some layers have in their place (see
            `qattn_hf.recipe`); they win over the recipe's. `family=False`: the method's defaults as they are, not those
            that the model's family has for it.

    Returns:
        the same object.

    Raises:
        RecipeError: a recipe or setting that cannot be. UnsupportedError: a model that cannot be served, with the
        reason and what to do instead. In both cases the model is as it was.
    """
    check_model(model)
    _compat.warn_if_untested()
    chosen = find_recipe(method, recipe, settings).for_model(model.config)
    specs = chosen.layer_specs(model.config, model.device.type, share_of(model))
    decode = resolve_decode(model, chosen.settings.decode) if chosen.settings.packs() else ("stock", STEPS)
    if hasattr(model, "_qattn"):
        unpatch(model)
    patched = hooks.Patched(chosen, specs, model.device.type, [], *decode)
    _own_config(model)
    before = patched.attn_implementations = [c._attn_implementation for c in _configs(model.config)]
    name = patched.register()
    try:
        _select(model, name)
        check_selected(model, name)
    except Exception:  # whatever it is, the model must be as it was; it is raised again
        _restore(model, before)
        raise
    hooks.install(model, patched)
    return model


def unpatch(model: Model) -> Model:
    """Undo `patch`: the model computes bit for bit what it did before; its config stays an object of its own.

    Raises:
        QAttnError: if the model is not patched.
    """
    release(model)
    before = model._qattn.attn_implementations
    hooks.uninstall(model)
    _restore(model, before)
    return model


def release(model: PreTrainedModel) -> None:
    """Give back the memory that a patched model keeps for its next call: its last cache, unless you hold it too, the
    memory of earlier ones, and captured decode steps. The next call makes them anew.

    Raises:
        QAttnError: if the model is not patched.
    """
    if not hasattr(model, "_qattn"):
        raise QAttnError("this model is not patched")
    hooks.patch_of(model).release()


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let an unpatched model attend by a function registered with transformers as `name`, and put its own back.

    Raises:
        UnsupportedError: a model whose attention cannot be reached. QAttnError: if it is patched.
    """
    if hasattr(model, "_qattn"):
        raise QAttnError("this model is patched: unpatch(model) first")
    check_model(model)
    _own_config(model)
    before = [c._attn_implementation for c in _configs(model.config)]
    try:
        _select(model, name)
        check_selected(model, name)
        yield
    finally:
        _restore(model, before)


def _configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A config and its sub-configs, in a fixed order."""
    subs = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(c for sub in subs if isinstance(sub, PretrainedConfig) for c in _configs(sub))]


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a copy of its config: two models built from one config object share it."""
    old = _configs(model.config)
    copied = copy.deepcopy(model.config)
    new = {id(a): b for a, b in zip(old, _configs(copied), strict=True)}
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in new:
            module.config = new[id(config)]


def _select(model: PreTrainedModel, name: str) -> None:
    text = model.config.get_text_config(decoder=True)
    names = [n for n in model.config.sub_configs if getattr(model.config, n, None) is text]
    model.set_attn_implementation({names[0]: name} if names else name)


def _restore(model: PreTrainedModel, before: list[str | None]) -> None:
    for config, name in zip(_configs(model.config), before, strict=True):
        config._attn_implementation_internal = name
