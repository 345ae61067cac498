"""Options that several commands have, the recipe that they choose, and a summary of a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.messages import parse_size, size

if TYPE_CHECKING:
    from qattn_hf.recipes.recipe import Recipe


def known_methods(texts: list[str] | str | None) -> Any:
    """The methods of an option, once their names are known: a typo is told before torch is loaded, which takes seconds.

    Raises:
        RecipeError: an unknown method or recipe, or a setting that is not `KEY=VALUE`.
    """
    from qattn_hf.recipes.recipe_files import check_name
    from qattn_hf.recipes.spelling import FULL, split_method, split_methods

    for text in [texts] if isinstance(texts, str) else split_methods(texts or ()):
        if (name := split_method(text)[0]) != FULL:
            check_name(name)
    return texts


def known_recipe(text: str | None) -> Any:
    """The recipe of an option, once its name is known, before torch is loaded; files are looked for later.

    Raises:
        RecipeError: there is no recipe of that name.
    """
    from qattn_hf.recipes.recipe_files import YAML, is_of_hub, recipe_file

    if text is not None and Path(text).suffix not in YAML and not is_of_hub(text):
        recipe_file(text)
    return text


def read_settings(texts: list[str] | None) -> Any:
    """The settings of an option, once they can be read, before torch is loaded; their names are checked later.

    Raises:
        RecipeError: one is not `KEY=VALUE`, or is given twice.
    """
    from qattn_hf.recipes.spelling import parse_settings

    parse_settings(texts)
    return texts


ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or hub name of a causal LM.", show_default="embedded model"),
]
ModelArgument = Annotated[
    str | None, typer.Argument(help="Folder or hub name of a causal LM.", show_default="embedded model")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="How the cache is packed: a method, a recipe's name or a YAML file, with settings, such as turbo:bits=2; "
        "`qattn methods` lists them.",
        show_default="turbo",
        callback=known_methods,
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="YAML file with a method and its settings, a recipe's name, or a hub repository.",
        callback=known_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting of the method, such as bits=2; may be repeated.",
        callback=read_settings,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where to run, such as cpu or cuda:0.", show_default="a GPU if any")
]
SEVERAL = "Such as turbo, kivi:bits=4, or a recipe's name or file; may be repeated, or with commas between."


class UsageError(ValueError):
    """An invalid option, found by a command itself; those that typer finds have the same exit code."""

    exit_code = 2


def gib(text: str) -> int:
    """Bytes of an option's size; a number without a unit counts GiB.

    Raises:
        BadParameter: it is no size.
    """
    try:
        return parse_size(text, bare=2**30)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


WeightsOption = Annotated[
    int | None,
    typer.Option(
        "--weights",
        parser=gib,
        metavar="SIZE",
        help="Size of the weights, such as 16GiB; a number counts GiB.",
        show_default="counted, unless quantized",
    ),
]


def gpu_memory_option(default: str | None) -> Any:
    """The option `--gpu-memory` in bytes; `default`: in words, what is taken without it."""
    more = "" if default else ", for the longest context that fits"
    words = f"Memory of the GPU, such as 24GiB or 80GB{more}; a number counts GiB."
    return typer.Option("--gpu-memory", parser=gib, metavar="SIZE", help=words, show_default=default or False)


def methods_option(default: Iterable[str]) -> Any:
    """The option `--method` of commands that compare several methods; `default`: the methods without it."""
    return typer.Option("--method", "--methods", help=SEVERAL, show_default=", ".join(default), callback=known_methods)


def write_rows(rows: list[dict[str, Any]], target: Path) -> None:
    """Write rows with command, date, device and versions as JSON, in the form of `eval/results/`."""
    from qattn_hf.messages.origin import origin

    conditions = origin(shlex.join(["qattn", *sys.argv[1:]]))
    target.write_text(json.dumps({"name": target.stem, **conditions, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def chosen_recipe(
    method: str | None, recipe: str | None, settings: list[str] | None, model: str | None = None
) -> Recipe:
    """The recipe that the options name, checked before a model loads.

    Without method and recipe it is `qattn.yaml` in the folder `model`, else `turbo`.

    Raises:
        RecipeError: an unknown method, recipe or setting, or an invalid value.
    """
    from qattn_hf.recipes.recipe import find_recipe
    from qattn_hf.recipes.spelling import parse_settings

    folder = None if model is None else str(Path(model).expanduser())
    return find_recipe(method, recipe, parse_settings(settings), checkpoint=folder)


def for_family(recipe: Recipe, model: Any) -> Recipe:
    """The recipe with the defaults of the model's family, which are reported on stderr."""
    recipe = recipe.for_model(model.config)
    if recipe.family is not None and (changed := recipe.from_family()):
        settings = " ".join(f"{key}={value}" for key, value in changed.items())
        print(f"{recipe.method} has {settings} for {recipe.family}; family=false leaves it out", file=sys.stderr)
    return recipe


def summary(report: dict[str, Any]) -> str:
    """One line about the content of a cache, from `Report.to_dict()`."""
    if not report["kv_bytes"]:
        return f"{report['method']}: nothing packed, transformers' own cache held the tokens in the model's precision"
    kv_bytes, full = report["kv_bytes"], report["kv_bytes_full_precision"]
    text = f"{report['method']}: {report['packed_tokens']} tokens packed, {report['open_tokens']} open; "
    text += f"{size(kv_bytes)} instead of {size(full)}"
    if report["effective_bits"] is not None and report["packed_tokens"]:
        text += f"; {report['effective_bits']:.2f} bits a value where packed"
    text += f", {report['effective_bits_total']:.2f} in all"
    return text + (" (in a short context the open tokens and spare room weigh most)" if kv_bytes > full else "")
