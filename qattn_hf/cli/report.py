"""`qattn report`."""

from __future__ import annotations

import json
from pathlib import Path
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
)
from qattn_hf.model.loading import load


def report(
    model: ModelOption = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    text: Annotated[Path | None, typer.Option(help="File to read.", show_default="a built-in text")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Read that many tokens; a short text is repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data for programs.")] = False,
    device: DeviceOption = None,
) -> None:
    """Read a text through a packed cache and show, layer by layer, what the cache holds.

    Example: qattn report --method turbo --tokens 2048
    """
    import torch

    from qattn_hf import patch
    from qattn_hf import report as report_of
    from qattn_hf.cli._prompts import PROSE

    content = PROSE if text is None else text.read_text(encoding="utf-8")
    if not content.strip():
        raise ValueError(f"--text {text}: the file holds no text")
    chosen = chosen_recipe(method, recipe, settings, model)
    _, lm, tokenizer = load(model, device)
    patch(lm, recipe=for_family(chosen, lm))
    ids = tokenizer(content).input_ids
    if tokens is None and text is None:
        tokens = 1000
    if tokens is not None:
        ids = (ids * -(-tokens // len(ids)))[:tokens]
    with torch.inference_mode():
        lm(torch.tensor([ids], device=lm.device), use_cache=True, logits_to_keep=1)
    result = report_of(lm)
    print(json.dumps(result.to_dict(), indent=1) if as_json else result)
