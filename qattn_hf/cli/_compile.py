"""Kernels that `qattn doctor --compile` compiles before a model needs them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from qattn_hf.cli._common import UsageError
from qattn_hf.model.loading import model_source

if TYPE_CHECKING:
    from qattn_hf.recipes.recipe import Recipe


def compile_kernels(model: str | None, recipe: Recipe, dtype: str, device: str) -> str:
    """Compile the kernels of a model and a recipe side by side, and return one line about them.

    Args:
        model: folder or hub name, whose config alone is read. dtype: precision of the model, or `auto`.
        device: a CUDA device of this machine.

    Raises:
        UsageError: this machine has no such GPU, or the reference computes these settings.
    """
    import torch
    from transformers import AutoConfig

    from qattn_hf.patching.warm import begin
    from qattn_hf.recipes.recipe import check_packs

    check_packs(recipe)
    config = AutoConfig.from_pretrained(model_source(model))
    target = torch.device(device)
    if target.type != "cuda" or not torch.cuda.is_available():
        raise UsageError("--compile compiles kernels for the GPU of this machine, and finds none")
    target = torch.device("cuda", torch.cuda.current_device() if target.index is None else target.index)
    precision = getattr(config, "dtype", None) or torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    began = time.perf_counter()
    specs = enumerate(recipe.for_model(config).layer_specs(config, "cuda"))
    compiled = begin(config, specs, precision, [target])
    if not compiled:
        raise UsageError(
            "--compile finds no kernels: the reference computes these settings. Fix: `qattn doctor` without --compile "
            "says why"
        )
    for one in compiled:
        one.result()
    name = torch.cuda.get_device_name(target)
    return f"compiled {len(compiled)} kernels for {name} in {time.perf_counter() - began:.1f} s"
