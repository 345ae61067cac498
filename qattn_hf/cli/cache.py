"""`qattn cache`: what a cache holds after a text, and caches in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

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
    chosen_recipe,
    for_family,
    read_text,
    summary,
    write_data,
)
from qattn_hf.messages import size
from qattn_hf.model.loading import load

cache = typer.Typer(help="Show what a packed cache holds, and save caches in files.")


@cache.command("report")
def report(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    text: Annotated[Path | None, typer.Option(help="Text file to read.", show_default="a built-in text")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to read. A shorter text is repeated.", show_default="1000, or all")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Show what a cache holds after a text, layer by layer.

    Example: qattn cache report MODEL --method turbo --tokens 2048
    """
    import torch

    from qattn_hf import patch
    from qattn_hf import report as report_of
    from qattn_hf.cli._prompts import PROSE

    content = PROSE if text is None else read_text(text)
    chosen = chosen_recipe(method, recipe, settings, model)
    _, lm, tokenizer = load(model, device, dtype)
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
    write_data(result.to_dict(), output)


@cache.command("build")
def build(
    text: Annotated[Path, typer.Option("--text", help="Text file to read, in UTF-8.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Safetensors file to write.")],
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
) -> None:
    """Read a text through a packed cache and save the cache.

    The file also holds the tokens. `QAttnCache.load(FILE, model=model)` loads the file. Put `cache.input_ids` in
    front of the question.

    Example: qattn cache build MODEL --method turbo --text document.txt -o prefix.safetensors
    """
    import torch

    from qattn_hf import report as report_of

    chosen = chosen_recipe(method, recipe, settings, model)
    content = read_text(text)
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no such folder")
    _, lm, tokenizer = load(model, device, dtype)
    held, ids = read(lm, for_family(chosen, lm), torch.tensor([tokenizer(content).input_ids], device=lm.device))
    held.save(output, input_ids=ids)
    print(f"{summary(report_of(held).to_dict())}\n{output}: {size(output.stat().st_size)}")


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
    file: Annotated[Path, typer.Argument(help="File from `qattn cache build` or `QAttnCache.save`.")],
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Show what a saved cache holds.

    Only the header of the file is read. No model is needed.

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
    write_data(about, output)
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
