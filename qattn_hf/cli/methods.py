"""`qattn methods`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import JsonOption, OutputOption, write_data
from qattn_hf.messages.console import results_console

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.console import Console

    from qattn_hf.methods import Method


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Method or recipe whose settings are listed in full.", show_default="all methods"),
    ] = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """List the methods and their settings, or everything about one method.

    Example: qattn methods turbo
    """
    if name is not None:
        from qattn_hf.recipes.recipe_files import check_name

        check_name(name)  # before torch is loaded, which takes seconds
    if output is not None:
        write_data(data_of(name), output)
    console = results_console()
    if as_json:
        print(json.dumps(data_of(name), indent=1))
    elif name is None:
        show_all(console)
        print("`qattn methods NAME` says what a setting may be. Use one with --method NAME:KEY=VALUE,...")
    else:
        show_one(console, name)


def named(name: str | None) -> list[str]:
    """The method that a method's or recipe's name means; all methods without a name."""
    from qattn_hf.methods import list_methods
    from qattn_hf.recipes.recipe import find_recipe

    return list_methods() if name is None else [find_recipe(name, None, {}).method]


def data_of(name: str | None) -> dict[str, Any]:
    """What `--json` prints and `--output` writes: `about` each method, or the one that `name` means."""
    return {"methods": [about(method) for method in named(name)]}


def about(name: str) -> dict[str, Any]:
    """A method as data: summary, kernels, recipes, and each setting with its values and default."""
    from qattn_hf.methods import get_method
    from qattn_hf.recipes.settings import allowed, known, reference_only

    method, without_kernels = get_method(name), reference_only(name)
    settings = {
        key: {
            "allowed": allowed(field),
            "default": field.default,
            "reference_only": without_kernels.get(key, []),
            "description": field.description,
        }
        for key, field in method.model_fields.items()
    }
    return {
        "name": name,
        "summary": summary(method),
        "kernels": known(name),
        "settings": settings,
        "recipes": recipes_of(name),
    }


def show_all(console: Console) -> None:
    """Print every method with its settings, then the settings that all methods have."""
    from qattn_hf.methods import Method, get_method, list_methods

    for name in list_methods():
        method = get_method(name)
        own = {key: field for key, field in method.model_fields.items() if key not in Method.model_fields}
        _settings(console, name, summary(method), own)
    _settings(console, "every method", "settings that all of them have", dict(Method.model_fields))


def _settings(console: Console, title: str, summary: str, fields: dict[str, FieldInfo]) -> None:
    from rich.table import Table
    from rich.text import Text

    from qattn_hf.recipes.settings import as_written

    heading = Text(f"{title}: {summary}", "bold")
    table = Table("setting", "default", "what it is", title=heading, title_justify="left")
    for key, field in fields.items():
        table.add_row(key, as_written(field.default), Text(field.description or ""))
    console.print(table if fields else heading, "")


def show_one(console: Console, name_or_recipe: str) -> None:
    """Print a method's settings with allowed values, what has no kernels, and the recipes that use it."""
    from rich.table import Table
    from rich.text import Text

    from qattn_hf.methods import Method, get_method
    from qattn_hf.recipes.settings import allowed, as_written, known, reference_only

    [name] = named(name_or_recipe)
    method, without_kernels = get_method(name), reference_only(name)
    heading = Text(f"{name}: {summary(method)}", "bold")
    table = Table("setting", "allowed", "default", "reference only", "what it is", title=heading, title_justify="left")
    for key, field in sorted(method.model_fields.items(), key=lambda item: item[0] in Method.model_fields):
        values = ", ".join(map(as_written, without_kernels.get(key, [])))
        table.add_row(key, Text(allowed(field)), as_written(field.default), values, Text(field.description or ""))
    console.print(table)
    print(f"Computed by: {kernels(known(name))} Values under `reference only` are the reference's on a GPU too.")
    for recipe, changed in recipes_of(name).items():
        print(f"Recipe {recipe}: {changed or 'the defaults'}")
    print(f"In Python: patch(model, '{name}:KEY=VALUE,...'); in commands: --method {name}:KEY=VALUE,...")


def summary(method: type[Method]) -> str:
    """The first line of a method's docstring."""
    return (method.__doc__ or "").strip().splitlines()[0]


def kernels(known: bool) -> str:
    """What computes a method's defaults: Triton kernels and where, or the reference."""
    from qattn_kernels.layer import support

    if not known:
        return "the reference, on a GPU too."
    return f"Triton kernels on a CUDA GPU, head dims {support.head_dims()}; else the reference."


def recipes_of(method: str) -> dict[str, str]:
    """Recipes of this package that use a method, with the settings that differ from its defaults."""
    from qattn_hf.recipes.recipe import list_recipes, load_recipe
    from qattn_hf.recipes.settings import as_written

    users = {}
    for name in list_recipes():
        recipe = load_recipe(name)
        if method in {recipe.method, *(choice.settings.name() for choice in recipe.choices)}:
            changed = recipe.settings.model_dump(exclude_defaults=True)
            users[name] = ", ".join(f"{key}={as_written(value)}" for key, value in changed.items())
    return users
