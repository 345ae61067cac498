"""`qattn retrieval`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from qattn_hf.cli._common import DeviceOption, ModelOption, UsageError, for_family, methods_option, write_rows
from qattn_hf.cli.compare import AtTokensOption, DtypeOption, measured_in, status_line
from qattn_hf.model.loading import load, short_name

Number = TypeVar("Number", int, float)
DEFAULT = ("int8", "turbo", "turbo:bits=2", "kivi", "kivi:bits=2", "turboquant")

TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template",
        help="Wording: ruler, English sentences, or pairs, what the small models here were trained for.",
        show_default="ruler; pairs for the embedded model",
    ),
]
KindsOption = Annotated[
    str | None,
    typer.Option(
        "--kinds",
        help="Of single, multikey, multivalue, multiquery, with commas between.",
        show_default="multikey,multiquery; multikey for the embedded model",
    ),
]
LengthsOption = Annotated[str, typer.Option("--lengths", help="Tokens of a text with its questions and answers.")]
DepthsOption = Annotated[str, typer.Option("--depths", help="Per cent of the text before a needle.")]
FillerOption = Annotated[
    Path | None, typer.Option("--text", help="File of the text around needles.", show_default="sentences that repeat")
]


def retrieval(
    model: ModelOption = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    template: TemplateOption = None,
    kinds: KindsOption = None,
    lengths: LengthsOption = "1024,2048",
    depths: DepthsOption = "0,25,50,75,100",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Texts of each kind and length.")] = 1,
    text: FillerOption = None,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Tokens of a call that reads a text.")] = 61,
    at_tokens: AtTokensOption = 4096,
    dtype: DtypeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows in place of the table.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file for rows, device and versions.")] = None,
    device: DeviceOption = None,
) -> None:
    """Count values in long texts that full precision finds and a packed cache loses: needles, as in RULER.

    Example: qattn retrieval --model NAME --lengths 4096,32768 --method turbo --method kivi:bits=2
    """
    wording = template or ("pairs" if model is None else "ruler")
    wanted = (kinds or ("multikey" if model is None else "multikey,multiquery")).replace(" ", "").split(",")
    sizes, places = numbers(lengths, "--lengths", int), numbers(depths, "--depths", float)
    from qattn_hf import compare
    from qattn_hf.fidelity.needles import check_asked
    from qattn_hf.recipes.recipe import find_recipes

    check_asked(wanted, places, wording)
    recipes = find_recipes(method or DEFAULT)
    filler = compare.FILLER if text is None else text.read_text(encoding="utf-8")
    name, lm, tokenizer = load(model, device)
    recipes = {spelling: for_family(recipe, lm) for spelling, recipe in recipes.items()}
    maker = compare.PromptMaker(tokenizer, wording, filler)
    prompts = compare.all_prompts(maker, wanted, sizes, places, seeds)
    own_dtype = measured_in(lm, dtype)
    with status_line() as progress:
        rows = compare.compare_retrieval(
            lm, maker, recipes, prompts, chunk=chunk, at_tokens=at_tokens, dtype=own_dtype, progress=progress
        )
    rows = [{"model": short_name(name), "template": wording, "seeds": seeds, **row} for row in rows]
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        compare.print_retrieval(rows)
    if output is not None:
        write_rows(rows, output)


def numbers(text: str, option: str, of: Callable[[str], Number]) -> list[Number]:
    """Numbers of a text, with commas between.

    Raises:
        UsageError: something else, named by its option.
    """
    try:
        return [of(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: give numbers with commas between, such as 1024,2048") from error
