"""Compile kernels in parallel before a call needs them: in threads of `patch`, or by `qattn doctor --compile`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf.layer.memory_budget import BudgetLayerSpec, all_stages
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, local_window
from qattn_kernels.layer.spec import LayerSpec

if TYPE_CHECKING:
    from qattn_kernels.step.warm import LayerShape

log = logging.getLogger(__name__)


def shapes(
    config: PretrainedConfig,
    specs: list[LayerSpec | ModelLayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    shards: int = 1,
) -> dict[LayerShape, list[int]]:
    """Return the shapes of the layers that kernels compute, each with its layers.

    Args:
        config: the model's config.
        specs: one for each layer, from `Recipe.layer_specs`. Unpacked layers and layers of the reference need no
            kernels.
        dtype: dtype of keys and values.
        device: where the layers run.
        shards: number of processes among which the heads are split.
    """
    capped = bool(getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None))
    found: dict[LayerShape, list[int]] = {}
    for i, spec in enumerate(specs):
        if not isinstance(spec, LayerSpec) or spec.impl != "triton":
            continue
        from qattn_kernels.step.warm import LayerShape  # loads Triton

        sizes = head_sizes(config, i)
        heads = sizes.query // shards, sizes.kv // shards, sizes.dim
        for one in all_stages(spec) if isinstance(spec, BudgetLayerSpec) else (spec,):
            shape = LayerShape(one, *heads, dtype, device, capped, local_window(one), sizes.v_dim)
            found.setdefault(shape, []).append(i)
    return found


def begin(
    config: PretrainedConfig,
    specs: list[LayerSpec | ModelLayerSpec],
    dtype: torch.dtype,
    devices: Iterable[torch.device],
    shards: int = 1,
) -> list[Future]:
    """Start compiling in threads the kernels that `generate` needs. A call waits for the kernels that it launches.

    Args:
        config, specs, dtype, shards: as in `shapes`.
        devices: GPUs on which layers run.

    Returns:
        A future for each kernel function. If one failed, a call compiles the kernel itself and reports its error.
    """
    found = [shape for device in devices for shape in shapes(config, specs, dtype, device, shards)]
    if not found:
        return []
    from qattn_kernels.step.warm import warm  # loads Triton

    return warm(found)


def begin_for(model: PreTrainedModel, specs: list[LayerSpec | ModelLayerSpec], shards: int) -> list[Future]:
    """Run `begin` for a model on GPUs. Returns [] for other models and on errors, as calls compile missing kernels."""
    devices = dict.fromkeys(p.device for p in model.parameters() if p.device.type == "cuda")
    try:
        return begin(model.config, specs, model.dtype, devices, shards) if devices else []
    except Exception as error:  # the model is patched by now, and its first call reports the error again
        log.warning("kernels are not compiled ahead: %s", error)
        return []
