"""`qattn retrieval`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from qattn_hf.cli._common import (
    AtTokensOption,
    DeviceOption,
    JsonOption,
    MeasuredDtypeOption,
    ModelArgument,
    OutputOption,
    UsageError,
    WideOption,
    for_family,
    measured_in,
    methods_option,
    print_rows,
    read_text,
    status_line,
    write_data,
)
from qattn_hf.errors import QAttnError
from qattn_hf.model.loading import load, short_name

Number = TypeVar("Number", int, float)
DEFAULT = ("int8", "turbo", "turbo:bits=2", "kivi", "kivi:bits=2", "turboquant")

TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template",
        help="Wording of the text: ruler (English sentences) or pairs (for the small models of this package).",
        show_default="ruler; pairs for the embedded model",
    ),
]
KindsOption = Annotated[
    str | None,
    typer.Option(
        "--kinds",
        help="Kinds of needles, with commas between: single, multikey, multivalue, multiquery.",
        show_default="multikey,multiquery; multikey for the embedded model",
    ),
]
LengthsOption = Annotated[str, typer.Option("--lengths", help="Tokens of each text, with the questions and answers.")]
DepthsOption = Annotated[str, typer.Option("--depths", help="Percentage of the text in front of a needle.")]
FillerOption = Annotated[
    Path | None,
    typer.Option("--text", help="File with the text around the needles.", show_default="repeated sentences"),
]


def retrieval(
    model: ModelArgument = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    template: TemplateOption = None,
    kinds: KindsOption = None,
    lengths: LengthsOption = "1024,2048",
    depths: DepthsOption = "0,25,50,75,100",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of texts of each kind and length.")] = 1,
    text: FillerOption = None,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Tokens of each call that reads a text.")] = 61,
    at_tokens: AtTokensOption = 4096,
    dtype: MeasuredDtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Count the values in long texts that a packed cache loses.

    A text hides values and a question asks for them, as in RULER. Full precision answers the same questions.

    Example: qattn retrieval MODEL --lengths 4096,32768 --method turbo --method kivi:bits=2
    """
    wording = template or ("pairs" if model is None else "ruler")
    wanted = (kinds or ("multikey" if model is None else "multikey,multiquery")).replace(" ", "").split(",")
    sizes, places = numbers(lengths, "--lengths", int), numbers(depths, "--depths", float)
    from qattn_hf import compare
    from qattn_hf.fidelity.needles import check_asked
    from qattn_hf.recipes.recipe import find_recipes

    try:
        check_asked(wanted, places, wording)
    except QAttnError as error:
        raise UsageError(str(error)) from error
    recipes = find_recipes(method or DEFAULT)
    filler = compare.FILLER if text is None else read_text(text)
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
        print_rows(rows)
    else:
        compare.print_retrieval(rows, wide)
    write_data({"rows": rows}, output)


def numbers(text: str, option: str, of: Callable[[str], Number]) -> list[Number]:
    """Numbers of a text, with commas between.

    Raises:
        UsageError: something else, named by its option.
    """
    try:
        return [of(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: give numbers with commas between, such as 1024,2048") from error
