"""Which attention the configs of a model name: replaced for a while or for a patch, and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf.errors import QAttnError
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.supported_models import check_full, check_model, check_selected

Selected = list[tuple[PretrainedConfig, str | None]]


@contextmanager
def attending(model: PreTrainedModel, name: str, full: bool = True) -> Iterator[None]:
    """Context in which an unpatched model uses the attention registered with transformers as `name`.

    Args:
        full: whether that attention serves layers of full attention alone; models with others are then refused.

    Raises:
        UnsupportedError: a model whose attention cannot be replaced in every layer.
        QAttnError: the model is patched.
    """
    check_model(model)
    if full:
        check_full(model)
    if hasattr(model, "_qattn"):
        raise QAttnError("this model is patched: unpatch(model) first")
    with selecting(model, name):
        yield


@contextmanager
def selecting(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context in which the decoder of an unpatched model has the attention of this name selected.

    Raises:
        UnsupportedError: a module that does not follow the model's config.
    """
    own_config(model)
    before = selected(model)
    try:
        select(model, name)
        check_selected(model, name)
        yield
    finally:
        restore(before)


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Every config object of a model and its modules, sub-configs included.

    A decoder that was once patched by itself has a config that the whole model's config does not contain.
    """
    of_modules = (vars(module).get("config") for module in model.modules())
    configs = [c for config in of_modules if isinstance(config, PretrainedConfig) for c in _with_subs(config)]
    return list({id(config): config for config in configs}.values())


def _with_subs(config: PretrainedConfig) -> list[PretrainedConfig]:
    subs = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(c for sub in subs if isinstance(sub, PretrainedConfig) for c in _with_subs(sub))]


def own_config(model: PreTrainedModel) -> None:
    """Replace the model's configs by copies, since two models built from one config object share it."""
    old = _configs(model)
    new = dict(zip(map(id, old), copy.deepcopy(old), strict=True))
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in new:
            module.config = new[id(config)]


def selected(model: PreTrainedModel) -> Selected:
    """Each config of a model, and the attention that it names."""
    return [(config, config._attn_implementation) for config in _configs(model)]


def select(model: PreTrainedModel, name: str) -> None:
    """Let the decoder's config name the attention registered with transformers as `name`."""
    text, decoder = model.config.get_text_config(decoder=True), decoder_of(model)
    names = [n for n in model.config.sub_configs if getattr(model.config, n, None) is text]
    model.set_attn_implementation({names[0]: name} if names else name)
    if decoder.config._attn_implementation != name:
        decoder.set_attn_implementation(name)


def restore(before: Selected) -> None:
    """Let configs name the attention that they named when `selected` noted it."""
    for config, name in before:
        config._attn_implementation_internal = name
