"""Parse the spelling of a method with settings, shared by Python, every command and lm-eval's arguments.

    turbo                       a method with its defaults
    turbo:bits=2                with one setting
    kivi:k_bits=4,v_bits=2      with several
    turbo_sink:sink_num=2       a recipe of this package, with one setting changed
    mine.yaml                   a recipe in a file

A value is JSON (`[1,2]`, `true`, `null`), else YAML (`1e-4`, `.inf`, text without quotes). Commas inside brackets or
quotes belong to the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from qattn_hf.errors import RecipeError
from qattn_hf.messages import shown
from qattn_hf.recipes.yaml_reader import parse_yaml

FULL = "full"  # given instead of a method: full precision, nothing is packed
SPELLED = re.compile(r"((?:[A-Za-z]:(?=[\\/]))?[^:]*)(?::(.*))?", re.DOTALL)  # C:\mine.yaml is a name too
PART = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.DOTALL)  # a string of JSON, or one character


def split_method(text: str) -> tuple[str, dict[str, Any]]:
    """Split name and settings: `turbo:bits=2,softmax=sas` -> `("turbo", {"bits": 2, "softmax": "sas"})`.

    The name is not looked up.

    Raises:
        RecipeError: the text after the colon is not `KEY=VALUE,...`, or a key is given twice.
    """
    match = SPELLED.fullmatch(text)
    assert match is not None  # it matches any text
    name, settings = match.groups()
    return name.strip(), {} if settings is None else parse_settings(_at_commas(settings), shown(text))


def split_methods(texts: Iterable[str]) -> list[str]:
    """Split texts of several methods: `["turbo:k_bits=4,v_bits=2,kivi"]` -> `["turbo:k_bits=4,v_bits=2", "kivi"]`.

    A part without `=` begins the next method.
    """
    methods: list[str] = []
    for item in (item for text in texts for item in _at_commas(text)):
        key, equals, _ = item.partition("=")
        if methods and equals and ":" not in key:
            methods[-1] += f",{item}"
        else:
            methods.append(item.strip())
    return methods


def parse_settings(items: Iterable[str] | None, where: str = "--set") -> dict[str, Any]:
    """Parse settings from texts: `["k_bits=4", "softmax=sas"]` -> `{"k_bits": 4, "softmax": "sas"}`.

    Args:
        where: name of the option, for messages.

    Raises:
        RecipeError: an item has no `=`, a value is neither JSON nor YAML, or a key is given twice.
    """
    settings: dict[str, Any] = {}
    for item in items or []:
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise RecipeError(f"{where} takes KEY=VALUE, such as bits=2, not {shown(item)}")
        if key in settings:
            raise RecipeError(f"{where} {item}: {key} is given twice; keep one of them")
        try:
            settings[key] = json.loads(value, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError):
            settings[key] = parse_yaml(value, f"{where} {key}")
    return settings


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON mapping. Raises ValueError if a key occurs twice, and the YAML reader then reports it."""
    if len(pairs) > len(mapping := dict(pairs)):
        raise ValueError
    return mapping


def _at_commas(text: str) -> list[str]:
    """Split a text at commas outside of brackets and quotes."""
    parts, depth = [""], 0
    for match in PART.finditer(text):
        piece = match[0]
        if piece == "," and depth <= 0:
            parts.append("")
            continue
        depth += (piece in "[{") - (piece in "]}")
        parts[-1] += piece
    return parts
