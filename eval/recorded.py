"""Recorded results: reading them, with settings spelled as they are today, and the line of their conditions."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

from qattn_hf.errors import QAttnError
from qattn_hf.methods import get_method, list_methods
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.recipes.recipe_files import list_recipes

Result = dict[str, Any]
# What the quality measurement reports of a method; every other key of a row is one of the method's settings.
FIGURES = {
    "model", "method", "kl", "same_top1", "ppl", "ppl_change_pct", "se_pct", "packed_tokens", "effective_bits",
    "effective_bits_total", "kv_bytes", "impl", "sums", "recall", "sums_lost_won", "recall_lost_won", "head_dim",
    "kv_heads", "tokens",
}  # fmt: skip
SHOWN = ("torch", "transformers", "triton")  # versions that a page names
SPELLED = ("method", "way", "setting", "recipe", "parent")  # keys of rows that spell a method with its settings
RECIPES = {"sage2:version=1": "sage1"}  # settings that are a recipe today, and no setting any more
APART = ("quality-", "bits")  # name prefixes of records whose rows have settings as separate keys


def load(results: Path, pattern: str) -> list[Result]:
    """Recorded results whose names match `pattern`, such as `bits*`, with settings spelled as they are today."""
    return [spelled_now(run) for path in sorted(results.glob(f"{pattern}.json")) for run in runs_of(path)]


def runs_of(path: Path) -> list[Result]:
    """The runs that a file of results holds, each with rows, command, date, versions and device.

    A file has one run, or `runs`, each with its name under `run`: it is called `RECORD:RUN`, as `eval/record.py` takes
    it.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if "runs" not in record:
        return [record]
    return [{"name": f"{record['name']}:{run['run']}", **run} for run in record["runs"]]


def spelled_now(result: Result) -> Result:
    """A record whose rows spell each setting as it is spelled today.

    `defaults` of a record names methods that had other defaults then, `{"turbo": {"sink_num": 0, "sink_window": 0}}`:
    what was `turbo` is `turbo:sink_num=0`. `recipes` names recipes that had other settings, and gives these:
    `{"low3": "sinkq:bits=3,rotate_k=hadamard"}`. Settings that a recipe has today get its name.
    """
    defaults, recipes = result.get("defaults", {}), result.get("recipes", {})
    apart = result.get("name", "").startswith(APART)
    result["rows"] = [_row_now(row, defaults, recipes, apart) for row in result["rows"]]
    return result


def _row_now(row: Result, defaults: dict[str, Any], recipes: dict[str, str], apart: bool) -> Result:
    if apart and asked(row) in RECIPES:
        return {key: value for key, value in row.items() if key in FIGURES} | {"method": RECIPES[asked(row)]}
    if apart and row["method"] in defaults:
        own = settings(row)
        now = _given_now(own, row["method"], defaults[row["method"]])
        return {key: value for key, value in row.items() if key not in own} | now
    spelled = {key: _text_now(row[key], defaults, recipes) for key in SPELLED if isinstance(row.get(key), str)}
    return row | spelled


def _text_now(text: str, defaults: dict[str, Any], recipes: dict[str, str]) -> str:
    """Return a method as commands spell it. Text after a space, such as ` graph`, is kept."""
    spelled, *rest = text.split(" ")
    spelled = RECIPES.get(spelled, spelled)
    name, _, changed = spelled.partition(":")
    if name in recipes:
        spelled = _joined(*recipes[name].split(":", 1), *([changed] if changed else []))
        name, _, changed = spelled.partition(":")
    if name in defaults:
        given = dict(pair.split("=", 1) for pair in changed.split(",") if pair)
        spelled = _joined(name, ",".join(f"{k}={v}" for k, v in _given_now(given, name, defaults[name]).items()))
    return " ".join([named(spelled), *rest])


def _joined(name: str, *settings_texts: str) -> str:
    """`low2` and the texts of settings, where a later one wins."""
    given: dict[str, str] = {}
    for text in settings_texts:
        given |= dict(pair.split("=", 1) for pair in text.split(",") if pair)
    return ":".join([name, ",".join(f"{key}={value}" for key, value in given.items())]) if given else name


@functools.cache
def named(spelled: str) -> str:
    """Return the name of these settings in a method's list or as a recipe of the package; else the text unchanged."""
    return spelled if spelled in all_listed() else _names().get(_meaning(spelled), spelled)


@functools.cache
def all_listed() -> tuple[str, ...]:
    """Settings as the methods' lists of what is worth measuring spell them, and the methods' names."""
    return (*(one.setting for name in list_methods() for one in get_method(name).measured), *list_methods())


@functools.cache
def _names() -> dict[str | None, str]:
    return {_meaning(text): text for text in (*list_recipes(), *all_listed())}


def _meaning(spelled: str) -> str | None:
    """Method and all settings of a text; None for what is no setting, or none any more."""
    if spelled.partition(":")[0] not in (*list_methods(), *list_recipes()):
        return None  # no file and no repository is looked for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of old names: nobody can rename what a record ran
            recipe = find_recipe(spelled, None, {})
    except QAttnError:
        return None
    return None if recipe.choices else f"{recipe.method} {recipe.settings.model_dump_json()}"


def _given_now(given: dict[str, Any], method: str, former: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that mean the same with today's defaults. Settings of an absent sink pool are left out."""
    meant = {**given, **{key: value for key, value in former.items() if key not in given}}
    if str(meant.get("sink_num")) == "0":
        meant = {key: value for key, value in meant.items() if key == "sink_num" or not key.startswith("sink_")}
    today = get_method(method).model_fields
    return {key: value for key, value in meant.items() if key not in former or str(value) != str(today[key].default)}


def conditions(results: Path, *patterns: str, notes: bool = False) -> str:
    """One line for a page: on what its figures were recorded. `notes` of single records follow as a list, if asked for.

    The JSON file of each record has its command, versions, date and note.
    """
    found = [result for pattern in patterns for result in load(results, pattern)]
    if not found:
        return "Not measured yet."
    dates: dict[str, list[str]] = {}
    for result in found:
        used = [f"{name} {result['versions'][name]}" for name in SHOWN if result["versions"].get(name)]
        dates.setdefault(", ".join([result["device"], *used]), []).append(result["date"])
    where = "; ".join(f"{name} ({_days(days)})" for name, days in dates.items())
    files = ", ".join(f"`eval/results/{pattern}.json`" for pattern in patterns)
    noted: dict[str, list[str]] = {}
    for result in (result for result in found if "note" in result):
        noted.setdefault(result["note"], []).append(f"`{result['name']}`")
    if not notes:
        return f"Recorded on {where}. Commands and versions{', with notes' if noted else ''}: {files}."
    listed = [f"- {', '.join(names)}: {note}." for note, names in noted.items()]
    return "\n".join([f"Recorded on {where}. Commands and versions: {files}.", *(["", *listed] if listed else [])])


def _days(dates: list[str]) -> str:
    first, last = min(dates), max(dates)
    return first if first == last else f"{first} to {last}"


def settings(row: dict[str, Any]) -> dict[str, Any]:
    """Return the method's settings from a row of quality or of bits."""
    return {key: value for key, value in row.items() if key not in FIGURES}


def asked(row: dict[str, Any]) -> str:
    """`turbo`, or `turbo:k_bits=4,v_bits=2`: as the commands take it."""
    given = ",".join(f"{key}={_as_yaml(value)}" for key, value in settings(row).items())
    return f"{row['method']}:{given}" if given else row["method"]


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
