"""Compile kernels in parallel before a call needs them: in threads of `patch`, or by `qattn check --compile`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future

import torch
from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf.layer.memory_budget import BudgetLayerSpec, all_stages
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, local_window
from qattn_hf.model.tensor_parallel import shard_of
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.layer.spec import LayerSpec

log = logging.getLogger(__name__)


def begin(
    config: PretrainedConfig,
    specs: Iterable[tuple[int, LayerSpec | ModelLayerSpec]],
    dtype: torch.dtype,
    devices: Iterable[torch.device],
    shards: int = 1,
) -> list[Future]:
    """Start compiling in threads the kernels that `generate` needs. A call waits for the kernels that it launches.

    Args:
        config: the model's config.
        specs: layer indices and specs, from `Recipe.layer_specs` of one recipe or of several. Unpacked layers and
            layers of the reference need no kernels.
        dtype: dtype of keys and values.
        devices: GPUs on which layers run.
        shards: number of processes among which the heads are split.

    Returns:
        A future for each kernel function. If one failed, a call compiles the kernel itself and reports its error.
    """
    fused = dict.fromkeys(
        (one, head_sizes(config, i))
        for i, spec in specs
        if isinstance(spec, LayerSpec) and spec.impl == "triton"
        for one in (all_stages(spec) if isinstance(spec, BudgetLayerSpec) else (spec,))
    )
    if not fused:
        return []
    from qattn_kernels.step.warm import LayerShape, warm  # loads Triton

    capped = bool(getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None))
    return warm(
        LayerShape(
            spec,
            heads.query // shards,
            heads.kv // shards,
            heads.dim,
            dtype,
            device,
            capped,
            local_window(spec),
            heads.v_dim,
        )
        for spec, heads in fused
        for device in devices
    )


def begin_for(model: PreTrainedModel, recipes: Iterable[Recipe]) -> list[Future]:
    """Run `begin` for a model on GPUs and the recipes that it will be patched with.

    Returns [] for other models and on errors, as calls compile missing kernels.
    """
    devices = dict.fromkeys(p.device for p in model.parameters() if p.device.type == "cuda")
    if not devices:
        return []
    kind, shard = device_of(model).type, shard_of(model)
    try:
        specs = [
            pair
            for recipe in recipes
            for pair in enumerate(recipe.for_model(model.config).layer_specs(model.config, kind, shard))
        ]
        return begin(model.config, specs, model.dtype, devices, shard.size)
    except Exception as error:  # a call reports the error again
        log.warning("kernels are not compiled ahead: %s", error)
        return []
