"""`qattn generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    DtypeOption,
    MethodOption,
    ModelArgument,
    RecipeOption,
    SetOption,
    chosen_recipe,
    for_family,
    summary,
)
from qattn_hf.model.loading import load


def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text that the model continues.")],
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest answer.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
) -> None:
    """Continue a prompt through a packed cache.

    The last line sums up the cache.

    Example: qattn generate MODEL --prompt "Once upon a time" --method turbo:k_bits=4,v_bits=2
    """
    from transformers import TextStreamer

    from qattn_hf import patch, report

    chosen = chosen_recipe(method, recipe, settings, model)
    _, lm, tokenizer = load(model, device, dtype)
    patch(lm, recipe=for_family(chosen, lm))
    if chat:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    lm.generate(
        **inputs.to(lm.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
    )
    print(f"\n[{summary(report(lm).to_dict())}]")
