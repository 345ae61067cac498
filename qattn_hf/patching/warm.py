"""Compile kernels in parallel before a call needs them: in threads of `patch`, or by `qattn doctor --compile`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf.layer.memory_budget import BudgetLayerSpec, all_stages
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, local_window
from qattn_hf.model.tensor_parallel import shard_of
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.layer.spec import LayerSpec

if TYPE_CHECKING:
    from qattn_kernels.step.warm import Calls, LayerShape

log = logging.getLogger(__name__)


def shapes(
    config: PretrainedConfig,
    specs: Iterable[tuple[int, LayerSpec | ModelLayerSpec]],
    dtype: torch.dtype,
    device: torch.device,
    shards: int = 1,
) -> dict[LayerShape, list[int]]:
    """Return the shapes of the layers that kernels compute, each with its layers.

    Args:
        config: the model's config.
        specs: layer indices and specs, from `Recipe.layer_specs` of one recipe or of several. Unpacked layers and
            layers of the reference need no kernels.
        dtype: dtype of keys and values.
        device: where the layers run.
        shards: number of processes among which the heads are split.
    """
    capped = bool(getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None))
    found: dict[LayerShape, list[int]] = {}
    for i, spec in specs:
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
    specs: Iterable[tuple[int, LayerSpec | ModelLayerSpec]],
    dtype: torch.dtype,
    devices: Iterable[torch.device],
    shards: int = 1,
    calls: Calls | None = None,
) -> list[Future]:
    """Start compiling kernels in threads. A call waits for the kernels that it launches.

    Args:
        config, specs, dtype, shards: as in `shapes`.
        devices: GPUs on which layers run.
        calls: rows, tokens and earlier blocks of the calls that need kernels. By default the calls of `generate`.

    Returns:
        A future for each kernel function. If one failed, a call compiles the kernel itself and reports its error.
    """
    specs = list(specs)
    found = [shape for device in devices for shape in shapes(config, specs, dtype, device, shards)]
    if not found:
        return []
    from qattn_kernels.step.warm import CALLS, warm  # loads Triton

    return warm(found, calls or CALLS)


def begin_for(model: PreTrainedModel, recipes: Iterable[Recipe], calls: Calls | None = None) -> list[Future]:
    """Run `begin` for a model on GPUs and the recipes that it will be patched with. `calls`: as there.

    Returns [] for other models and on errors, as calls compile missing kernels.
    """
    devices = dict.fromkeys(p.device for p in model.parameters() if p.device.type == "cuda")
    if not devices:
        return []
    kind, shard = device_of(model).type, shard_of(model)
    try:
        chosen = [recipe.for_model(model.config) for recipe in recipes]
        packing = [recipe for recipe in chosen if recipe.settings.packs()]
        specs = [pair for recipe in packing for pair in enumerate(recipe.layer_specs(model.config, kind, shard))]
        return begin(model.config, specs, model.dtype, devices, shard.size, calls)
    except Exception as error:  # a call reports the error again
        log.warning("kernels are not compiled ahead: %s", error)
        return []
