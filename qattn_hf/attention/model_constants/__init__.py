"""State tensors of a model's layers that no call writes, since they are of the model: found when it is patched.

Queries and keys of one pass over random tokens say what they are, so that no text is needed: how much of an error of a
key's channel the others make up for (`compensate_k`, `compensation.py`), and what channels are multiplied by before
keys are rotated (`equalize_k`, `equalizer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import compensation, equalizer
from qattn_hf.errors import UnsupportedError
from qattn_hf.model.layer_kinds import ModelLayerSpec
from qattn_kernels.formats.traits import compensates
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State

Passes = dict[tuple[Any, ...], dict[int, torch.Tensor]]  # what passes of a model found, by what was asked of them


def constants(
    model: PreTrainedModel, specs: Sequence[LayerSpec | ModelLayerSpec], passes: Passes | None = None
) -> list[State]:
    """Of each layer the state tensors that no call writes, by name, on its device; where no layer has any, nothing
    runs.

    Args:
        model: not patched; it runs once for each of the two settings.
        passes: what earlier calls for the same model found, an empty dict at first; this call adds to it. A pass that
            is there already does not run again.

    Raises:
        UnsupportedError: a model whose queries cannot be observed.
        QAttnError: the model is patched.
    """
    packed = {i: spec for i, spec in enumerate(specs) if isinstance(spec, LayerSpec)}
    equalized = {i: spec for i, spec in packed.items() if spec.compute.equalize}
    compensated = {i: spec for i, spec in packed.items() if compensates(spec.k)}
    passes = {} if passes is None else passes
    scales = passes.get(asked := ("equalize_k", *equalized), {})
    if equalized and not scales:
        scales = passes[asked] = equalizer.equalizers(model, equalized)
    _check("equalize_k", equalized, scales)
    turned = ((i, spec.compute.rotate, spec.compute.equalize) for i, spec in compensated.items())
    moments = passes.get(asked := ("compensate_k", *turned), {})
    if compensated and not moments:
        moments = passes[asked] = compensation.second_moments(model, compensated, scales)
    _check("compensate_k", compensated, moments)
    found: list[State] = [{} for _ in specs]
    for i, scale in scales.items():
        found[i]["k.equalizer"] = scale
    for i, moment in moments.items():
        found[i]["k.compensation"] = compensation.shares(moment)
    return found


def _check(setting: str, wanted: dict[int, LayerSpec], found: dict[int, torch.Tensor]) -> None:
    """Refuse a model with a layer for which nothing was found."""
    if missing := wanted.keys() - found.keys():
        raise UnsupportedError(
            f"{setting}: layer {min(missing)} gets no queries of its own in a pass of this model; leave it out"
        )
