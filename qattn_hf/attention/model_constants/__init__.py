"""State tensors of layers that depend only on the model. They are computed at `patch`, and no call writes them.

One pass over random tokens yields queries and keys, so no text is needed. `compensation.py` measures how far channels
of a key can compensate each other's errors (`compensate_k`). `equalizer.py` computes the factors of channels before the
rotation of keys (`equalize_k`). `checkpoint_scales.py` reads scales from the checkpoint, without a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import checkpoint_scales, compensation, equalizer
from qattn_hf.errors import UnsupportedError
from qattn_hf.model.layer_kinds import ModelLayerSpec
from qattn_kernels.formats.traits import compensates, has_static_scales
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State

Tensors = dict[int, torch.Tensor]  # by layer
Passes = dict[tuple[Any, ...], Tensors]  # results of passes over a model, by the arguments of the pass


def constants(
    model: PreTrainedModel, specs: Sequence[LayerSpec | ModelLayerSpec], passes: Passes | None = None
) -> list[State]:
    """Return for each layer the state tensors that no call writes, by name, on the layer's device.

    Nothing runs if no layer has any.

    Args:
        model: an unpatched model; it runs once for each of the two settings.
        passes: results of earlier calls for the same model, an empty dict at first. This call adds its results. A pass
            with a result does not run again.

    Raises:
        UnsupportedError: the model's queries cannot be observed, or its checkpoint has no scales that the format takes.
        QAttnError: the model is patched.
    """
    packed = {i: spec for i, spec in enumerate(specs) if isinstance(spec, LayerSpec)}
    equalized = {i: spec for i, spec in packed.items() if spec.compute.equalize}
    compensated = {i: spec for i, spec in packed.items() if compensates(spec.k)}
    passes = {} if passes is None else passes
    scales = _passed(passes, "equalize_k", equalized, equalized, lambda: equalizer.equalizers(model, equalized))
    turned = [(i, spec.compute.rotate, spec.compute.equalize) for i, spec in compensated.items()]
    moments = _passed(
        passes, "compensate_k", compensated, turned, lambda: compensation.second_moments(model, compensated, scales)
    )
    found: list[State] = [{} for _ in specs]
    for i, scale in scales.items():
        found[i]["k.equalizer"] = scale
    for i, moment in moments.items():
        found[i]["k.compensation"] = compensation.shares(moment)
    static = {i: spec for i, spec in packed.items() if has_static_scales(spec.k)}
    for i, tensors in checkpoint_scales.read(model, static).items():
        found[i] |= tensors
    return found


def from_weights(specs: Sequence[LayerSpec | ModelLayerSpec]) -> bool:
    """Return whether a layer has constants that a pass of the model gives."""
    packed = [spec for spec in specs if isinstance(spec, LayerSpec)]
    return any(spec.compute.equalize or compensates(spec.k) for spec in packed)


def _passed(
    passes: Passes, setting: str, wanted: dict[int, LayerSpec], key: Iterable[Any], run: Callable[[], Tensors]
) -> Tensors:
    """Return the results of a pass over a model for the layers of `wanted`, from `passes` or from `run()`.

    Refuses a model if the pass found nothing for one of the layers."""
    found = passes.get(asked := (setting, *key), {})
    if wanted and not found:
        found = passes[asked] = run()
    if missing := wanted.keys() - found.keys():
        raise UnsupportedError(
            f"{setting}: layer {min(missing)} receives no queries in a pass of this model; leave {setting} out"
        )
    return found
