"""Make `docs/methods/NAME.md` from a method's docstring, fields, recipes, kernels, families and records."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from overview_table import settings_table
from pydantic.fields import FieldInfo
from table import NOT_MEASURED, markdown

from qattn_hf.assets import configs_dir
from qattn_hf.methods import Method, get_method, list_methods
from qattn_hf.recipes.families import list_families
from qattn_hf.recipes.settings import allowed, as_written, reference_only
from qattn_hf.recipes.yaml_reader import read_yaml

PAPERS = re.compile(r"\((papers?): ([^)]*)\)")  # as in `(paper: KIVI, Liu et al.)`


def method_page(name: str, results: Path) -> str:
    """The whole page of one method."""
    method = get_method(name)
    about = inspect.getdoc(method) or ""
    own = {key: field for key, field in method.model_fields.items() if key not in Method.model_fields}
    parts = [
        f"# {name}",
        "<!-- made by `python eval/tables.py`: edit the docstring and fields of the method instead -->",
        about,
        f"Source: `qattn_hf/methods/{name}.py`.{_papers(sys.modules[method.__module__].__doc__ or '')}",
        f'```python\nmodel = patch(model, "{name}")\n```',
        "## Settings",
        fields_table(own) if own else "It has only the settings that every method has.",
        "The settings of [every method](../settings.md#settings-of-every-method) apply as well. "
        f"`configs/{name}.yaml` has all settings at their defaults. Terms are in the [glossary](../glossary.md).",
        "## Kernels",
        _kernels(name),
        *_section("## Recipes", recipes_of(name)),
        *_section("## Model families", _families(name)),
        *_section("## Measured", _measured(name, results)),
    ]
    return "\n\n".join(parts) + "\n"


def _papers(source: str) -> str:
    """Return the papers that the first line of a method's file names in brackets. The rest repeats the docstring of the
    method."""
    found = PAPERS.search(source)
    return "" if found is None else f" {found[1].capitalize()}: {found[2].removesuffix('.')}."


def fields_table(fields: dict[str, FieldInfo]) -> str:
    """Table of settings: allowed values, default, description."""
    rows = [
        [f"`{key}`", allowed(field), f"`{as_written(field.default)}`", _escaped(field.description or "")]
        for key, field in fields.items()
    ]
    return markdown(["setting", "values", "default", "what it is"], rows)


def common_table(results: Path) -> str:
    """Settings that every method has."""
    return fields_table(dict(Method.model_fields))


def index_table(results: Path) -> str:
    """Links to the pages of all methods."""
    rows = [
        [f"[{name}]({name}.md)", (get_method(name).__doc__ or "").strip().splitlines()[0]] for name in list_methods()
    ]
    return markdown(["method", "what it does"], rows)


def nav(results: Path) -> str:
    """The methods' entries of `mkdocs.yml`."""
    return "\n".join(f"      - {name}: methods/{name}.md" for name in list_methods())


def recipes_of(name: str) -> str:
    """Table of the package's recipes that use this method with other settings."""
    rows = []
    for path, recipe in _recipes():
        if path.stem != name and recipe.get("method") == name:
            comment = path.read_text(encoding="utf-8").splitlines()
            why = " ".join(line.removeprefix("# ") for line in comment if line.startswith("# "))
            settings = ", ".join(f"`{key}={as_written(value)}`" for key, value in recipe.items() if key != "method")
            rows.append([f"`{path.stem}`", settings, _escaped(why)])
    return markdown(["recipe", "settings", "why"], rows) if rows else ""


@cache
def _recipes() -> list[tuple[Path, Any]]:
    """The package's recipes with their files."""
    return [(path, read_yaml(path)) for path in sorted(configs_dir().glob("*.yaml"))]


def _kernels(name: str) -> str:
    without_kernels = reference_only(name)
    if not without_kernels:
        return "Triton kernels compute every setting of this method on a GPU; see [kernels](../kernels.md)."
    listed = "\n".join(
        f"- `{key}`: {', '.join(f'`{as_written(value)}`' for value in values)}"
        for key, values in without_kernels.items()
    )
    return (
        "Triton kernels compute this method on a GPU. These settings have no kernels and use the slower PyTorch "
        f"reference, even on a GPU:\n\n{listed}"
    )


def _families(name: str) -> str:
    rows = []
    for family in list_families():
        if section := family.methods.get(name):
            settings = ", ".join(f"`{key}={as_written(value)}`" for key, value in section.settings.items())
            why = " ".join(filter(None, [section.why, section.advice]))
            rows.append([family.family, settings or "the defaults", _escaped(why), section.source])
    return markdown(["family", "settings", "why", "from"], rows) if rows else ""


def _measured(name: str, results: Path) -> str:
    table = settings_table(results, lambda found: found.partition(":")[0] == name or _recipe_of(found) == name)
    if table == NOT_MEASURED:
        return ""
    return f"{table}\n\n[All settings compared](../all-settings.md) explains the columns."


def _recipe_of(name: str) -> str | None:
    path = configs_dir() / f"{name}.yaml"
    return read_yaml(path).get("method") if path.is_file() else None


def _section(title: str, text: str) -> Iterable[str]:
    return [title, text] if text else []


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
