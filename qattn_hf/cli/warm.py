"""`qattn warm`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from qattn_hf.cli._common import DeviceOption, MethodOption, RecipeOption, SetOption, UsageError, chosen_recipe
from qattn_hf.loading import model_source


def warm(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub name of a causal LM.", show_default="embedded model")
    ] = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Precision of the model.", show_default="the config's, else bfloat16")
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Compile the kernels that a model will need, side by side, so that its first answer waits for none.

    No weights are downloaded. Triton keeps the kernels on disk, for later processes too. Example:

    qattn warm Qwen/Qwen3-8B --method turbo:bits=2
    """
    import torch
    from transformers import AutoConfig

    from qattn_hf.warm import begin

    chosen = chosen_recipe(method, recipe, settings, model)
    config = AutoConfig.from_pretrained(model_source(model))
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type != "cuda":
        raise UsageError("qattn warm compiles kernels for the GPU of this machine, and finds none")
    target = torch.device("cuda", torch.cuda.current_device() if target.index is None else target.index)
    precision = getattr(torch, dtype) if dtype else getattr(config, "dtype", None) or torch.bfloat16
    began = time.perf_counter()
    compiled = begin(config, chosen.for_model(config).layer_specs(config, "cuda"), precision, [target])
    for one in compiled:
        one.result()
    name = torch.cuda.get_device_name(target)
    print(f"{len(compiled)} kernels for {name} in {time.perf_counter() - began:.1f} s")
