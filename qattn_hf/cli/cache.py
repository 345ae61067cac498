"""`qattn cache`: read a text into a file once, and say what such a file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    MethodOption,
    ModelArgument,
    RecipeOption,
    SetOption,
    chosen_recipe,
    for_family,
    summary,
)
from qattn_hf.messages import size
from qattn_hf.model.loading import load

cache = typer.Typer(help="Save the cache of a text in a file, for many questions; or say what a file holds.")


@cache.command("build")
def build(
    text: Annotated[Path, typer.Option("--text", help="File to read, in UTF-8.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    device: DeviceOption = None,
) -> None:
    """Read a text through a packed cache and save the cache with its tokens.

    `QAttnCache.load(FILE, model=model)` reads it, and `cache.input_ids` go before the question. Example:

    qattn cache build MODEL --method turbo --text document.txt -o prefix.safetensors
    """
    import torch

    from qattn_hf import report

    chosen = chosen_recipe(method, recipe, settings, model)
    content = text.read_text(encoding="utf-8")
    if not content.strip():
        raise ValueError(f"--text {text}: the file holds no text")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no such folder")
    _, lm, tokenizer = load(model, device)
    held, ids = read(lm, for_family(chosen, lm), torch.tensor([tokenizer(content).input_ids], device=lm.device))
    held.save(output, input_ids=ids)
    print(f"{summary(report(held).to_dict())}\n{output}: {size(output.stat().st_size)}")


def read(lm: Any, recipe: Any, ids: Any) -> tuple[Any, Any]:
    """The cache of a model that has read tokens `[1, S]`, and these tokens; long texts are cut as `generate` does."""
    from qattn_hf import patch
    from qattn_hf.model._compat import CACHE

    patch(lm, recipe=recipe)
    ids = ids.to(lm.device)
    # the one new token is written, but not read into the cache
    out = lm.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    return out[CACHE], ids


@cache.command("info")
def info(
    file: Annotated[Path, typer.Argument(help="A file of `qattn cache build` or `QAttnCache.save`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print data for programs.")] = False,
) -> None:
    """Say what a saved cache holds; no model is needed. The tensors are not read: loading compares them.

    Example: qattn cache info prefix.safetensors
    """
    from qattn_hf.saved import read_header

    header = read_header(file)
    config = header["model"]["config"]
    packed = sum("own" not in layer for layer in header["layers"])
    about = {
        "file": str(file),
        "bytes": file.stat().st_size,
        "tokens": header["tokens"],
        "rows": header["rows"],
        "input_ids": "input_ids" in header["digests"],
        "method": header["method"],
        "recipe": header["recipe"],
        "model_type": config.get("model_type"),
        "dtype": header["model"]["dtype"],
        "layers": len(header["layers"]),
        "packed_layers": packed,
        "qattn": header["qattn"],
    }
    if as_json:
        print(json.dumps(about, indent=1))
        return
    rows, own = about["rows"], about["layers"] - packed
    ids = "with" if about["input_ids"] else "without"
    print(f"{file}: {size(about['bytes'])}, saved by qattn-hf {about['qattn']}")
    print(f"{about['tokens']} tokens in {rows} row{'s' * (rows > 1)}, {ids} their ids")
    not_packed = f", {own} not packed" if own else ""
    print(f"a {about['model_type']} of {about['layers']} layers in {about['dtype']}{not_packed}")
    print(f"recipe: {' '.join(header['recipe'].split())}")
