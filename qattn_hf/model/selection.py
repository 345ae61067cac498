"""Replace the attention that a model's configs name, temporarily or for a patch, and restore it."""

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
    """Make an unpatched model use the attention registered with Transformers as `name`, within a `with` block.

    Args:
        full: whether the attention serves only layers of full attention. Models with other layers are then refused.

    Raises:
        UnsupportedError: the model's attention cannot be replaced in every layer.
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
    """Select the attention `name` in the decoder of an unpatched model, within a `with` block.

    Raises:
        UnsupportedError: a module ignores the model's config.
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
    """Return every config object of a model and its modules, including sub-configs.

    After a decoder was patched separately, its config is missing from the whole model's config.
    """
    of_modules = (vars(module).get("config") for module in model.modules())
    configs = [c for config in of_modules if isinstance(config, PretrainedConfig) for c in _with_subs(config)]
    return list({id(config): config for config in configs}.values())


def _with_subs(config: PretrainedConfig) -> list[PretrainedConfig]:
    subs = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(c for sub in subs if isinstance(sub, PretrainedConfig) for c in _with_subs(sub))]


def own_config(model: PreTrainedModel) -> None:
    """Replace the model's configs by copies, because two models built from one config object share it."""
    old = _configs(model)
    new = dict(zip(map(id, old), copy.deepcopy(old), strict=True))
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in new:
            module.config = new[id(config)]


def selected(model: PreTrainedModel) -> Selected:
    """Return each config of a model with the attention that it names."""
    return [(config, config._attn_implementation) for config in _configs(model)]


def select(model: PreTrainedModel, name: str) -> None:
    """Make the decoder's config name the attention registered with Transformers as `name`."""
    text, decoder = model.config.get_text_config(decoder=True), decoder_of(model)
    names = [n for n in model.config.sub_configs if getattr(model.config, n, None) is text]
    model.set_attn_implementation({names[0]: name} if names else name)
    if decoder.config._attn_implementation != name:
        decoder.set_attn_implementation(name)


def restore(before: Selected) -> None:
    """Restore the attention that each config named when `selected` recorded it."""
    for config, name in before:
        config._attn_implementation_internal = name
