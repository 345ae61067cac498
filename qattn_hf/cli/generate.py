"""`qattn generate`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    ModelArgument,
    OutputOption,
    RecipeOption,
    SetOption,
    UsageError,
    chosen_recipe,
    for_family,
    summary,
    write_data,
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
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Continue a prompt through a packed cache.

    The last line sums up the cache. --json and --output give the text and the report.

    Example: qattn generate MODEL --prompt "Once upon a time" --method turbo:k_bits=4,v_bits=2
    """
    from transformers import TextStreamer

    from qattn_hf import patch, report

    chosen = chosen_recipe(method, recipe, settings, model)
    name, lm, tokenizer = load(model, device, dtype)
    patch(lm, recipe=for_family(chosen, lm))
    if chat:
        if tokenizer.chat_template is None:
            raise UsageError(f"--chat: {name} has no chat template. Fix: leave --chat out")
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = lm.generate(**inputs.to(lm.device), max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    data = {"model": name, "prompt": prompt, "text": text, "report": report(lm).to_dict()}
    print(json.dumps(data, indent=1) if as_json else f"\n[{summary(data['report'])}]")
    write_data(data, output)
