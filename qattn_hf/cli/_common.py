"""What the commands share: their options, loading a model, words about bytes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from qattn_hf.report import size

if TYPE_CHECKING:
    from qattn_hf.recipe import Recipe

DEFAULT_METHOD = "turbo"

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or hub name of a causal LM.", show_default="embedded model"),
]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", help="How the cache is packed; `qattn methods` lists them.", show_default=DEFAULT_METHOD),
]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="YAML file with a method and its settings.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting of the method, such as bits=2; may be repeated."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where to run, such as cpu or cuda:0.", show_default="a GPU if any")
]


class Loaded(NamedTuple):
    name: str
    model: Any
    tokenizer: Any


def parse_settings(items: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """`["k_bits=4", "softmax=sas"]` -> `{"k_bits": 4, "softmax": "sas"}`: JSON, else YAML, which takes `1e-4` for text.

    Raises:
        ValueError: an item has no `=`, a value is neither, or a key is given twice.
    """
    from qattn_hf.yaml_reader import parse_yaml

    settings: dict[str, Any] = {}
    for item in items or []:
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"{option} takes KEY=VALUE, such as bits=2, not {item!r}")
        if key in settings:
            raise ValueError(f"{option} {item}: {key} is given twice; keep one of them")
        try:
            settings[key] = json.loads(value, object_pairs_hook=_each_once)
        except (ValueError, RecursionError):
            settings[key] = parse_yaml(value, f"{option} {key}")
    return settings


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of JSON. One that gives a key twice is no setting; YAML's reader then says so."""
    if len(pairs) > len(found := dict(pairs)):
        raise ValueError
    return found


def split_method(text: str) -> tuple[str, dict[str, Any]]:
    """`turbo:k_bits=4,softmax=sas` -> `("turbo", {"k_bits": 4, "softmax": "sas"})`."""
    method, _, settings = text.partition(":")
    return method, parse_settings(settings.split(",") if settings else None)


def write_rows(rows: list[dict[str, Any]], target: Path) -> None:
    """Rows with where they come from, in the form of `eval/results/`."""
    from qattn_hf.bench.origin import origin

    head = origin(shlex.join(["qattn", *sys.argv[1:]]))
    target.write_text(json.dumps({"name": target.stem, **head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def load(name: str | None, device: str | None, dtype: str = "auto") -> Loaded:
    """The model and its tokenizer, by default in the model's own precision; None is the embedded demo model.

    Raises:
        FileNotFoundError: `name` is a path that does not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from qattn_hf.assets import demo_model_dir

    source = name or str(demo_model_dir())
    path = Path(source).expanduser()
    # A hub name has one slash at most; asking the hub for a mistyped path would end in a puzzling message.
    if (path.is_absolute() or source[0] in ".~" or source.count("/") > 1) and not path.is_dir():
        raise FileNotFoundError(f"--model {source}: no such folder")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = str(path) if path.is_dir() else source
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if name is None:
        torch.set_num_threads(1)  # so small a model is slower with more
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Loaded("embedded demo model" if name is None else name, model, tokenizer)


def short_name(name: str) -> str:
    """A hub name as it is, a folder without the way to it: what stands beside figures."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def chosen_recipe(method: str | None, recipe: Path | None, settings: list[str] | None) -> Recipe:
    """What the options ask for, `turbo` when they name neither a method nor a recipe; checked before a model loads."""
    from qattn_hf.recipe import find_recipe

    if method is None and recipe is None:
        method = DEFAULT_METHOD
    return find_recipe(method, recipe, parse_settings(settings))


def for_family(recipe: Recipe, model: Any) -> Recipe:
    """The recipe as this model takes it; what its family changes is told on stderr."""
    found = recipe.for_model(model.config)
    if found.family is not None and (changed := found.from_family()):
        said = " ".join(f"{key}={value}" for key, value in changed.items())
        print(f"{found.method} has {said} for {found.family}; family=false leaves it out", file=sys.stderr)
    return found


def split_methods(texts: list[str]) -> list[str]:
    """`["turbo:k_bits=4,v_bits=2,kivi"]` -> `["turbo:k_bits=4,v_bits=2", "kivi"]`: what has no `=` begins anew."""
    found: list[str] = []
    for item in (item for text in texts for item in text.split(",")):
        if found and "=" in item and ":" not in item:
            found[-1] += f",{item}"
        else:
            found.append(item.strip())
    return found


def named_recipes(texts: list[str]) -> dict[str, Recipe]:
    """Checked recipes that pack, by how they were asked for: a method, a recipe's name or its file, with settings."""
    from qattn_hf.methods import list_methods
    from qattn_hf.recipe import check_packs, find_recipe

    found = {}
    for text in split_methods(texts):
        name, settings = split_method(text)
        known = name in list_methods()
        recipe = find_recipe(name if known else None, None if known else name, settings)
        check_packs(recipe)
        found[text] = recipe
    return found


def summary(report: dict[str, Any]) -> str:
    """One line about what a cache holds, from `Report.to_dict()`."""
    if not report["kv_bytes"]:
        return f"{report['method']}: nothing packed, transformers' own cache held the tokens in the model's precision"
    held, full = report["kv_bytes"], report["kv_bytes_full_precision"]
    text = f"{report['method']}: {report['packed_tokens']} tokens packed, {report['open_tokens']} open; "
    text += f"{size(held)} instead of {size(full)}"
    if report["effective_bits"] is not None and report["packed_tokens"]:
        text += f"; {report['effective_bits']:.2f} bits a value where packed"
    text += f", {report['effective_bits_total']:.2f} in all"
    return text + (" (in a short context the open tokens and spare room weigh most)" if held > full else "")
