"""`qattn generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    MethodOption,
    ModelOption,
    RecipeOption,
    SetOption,
    chosen_recipe,
    for_family,
    summary,
)
from qattn_hf.model.loading import load


def generate(
    prompt: Annotated[str, typer.Argument(help="What the model continues.")],
    model: ModelOption = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    device: DeviceOption = None,
) -> None:
    """Continue a prompt through a packed cache, then print what the cache holds.

    Example: qattn generate "Once upon a time" --method turbo --set k_bits=4 --set v_bits=2
    """
    from transformers import TextStreamer

    from qattn_hf import patch, report

    chosen = chosen_recipe(method, recipe, settings, model)
    _, lm, tokenizer = load(model, device)
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
