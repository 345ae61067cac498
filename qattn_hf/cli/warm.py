"""`qattn warm`."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    MethodOption,
    ModelArgument,
    RecipeOption,
    SetOption,
    UsageError,
    chosen_recipe,
)
from qattn_hf.model.loading import model_source


def warm(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Precision of the model; auto is the config's, else bfloat16."),
    ] = "auto",
    device: DeviceOption = None,
) -> None:
    """Compile the kernels that a model will need, side by side, so that its first answer waits for none.

    No weights are downloaded. Triton keeps the kernels on disk, for later processes too. Example:

    qattn warm Qwen/Qwen3-8B --method turbo:bits=2
    """
    import torch
    from transformers import AutoConfig

    from qattn_hf.patching.warm import begin
    from qattn_hf.recipes.recipe import check_packs

    chosen = chosen_recipe(method, recipe, settings, model)
    check_packs(chosen)
    config = AutoConfig.from_pretrained(model_source(model))
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type != "cuda":
        raise UsageError("qattn warm compiles kernels for the GPU of this machine, and finds none")
    target = torch.device("cuda", torch.cuda.current_device() if target.index is None else target.index)
    precision = getattr(config, "dtype", None) or torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    began = time.perf_counter()
    compiled = begin(config, chosen.for_model(config).layer_specs(config, "cuda"), precision, [target])
    if not compiled:
        raise UsageError("the reference computes these settings, so there are no kernels; qattn check says why")
    for one in compiled:
        one.result()
    name = torch.cuda.get_device_name(target)
    print(f"{len(compiled)} kernels for {name} in {time.perf_counter() - began:.1f} s")
