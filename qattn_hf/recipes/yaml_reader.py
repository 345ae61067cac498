"""Strict YAML for recipes: text, numbers, true, false, null, lists, mappings, anchors and merge keys.

Other YAML is refused, with name and line:

- a key given twice, where YAML would keep the last value
- numbers such as `1:30` (90) and `010` (8)
- tags
- nested aliases that expand to more values than fit into memory
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from qattn_hf.errors import RecipeError
from qattn_hf.messages import cut, named

MAX_BYTES = 2**18  # size limit of a file; lists of heads for 126 layers with 64 heads take an eighth
MAX_DEPTH = 32  # limit of nested lists and mappings
MAX_NODES = 50_000  # limit of keys and values, aliases expanded
NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17}|[0-9]{0,40}\.[0-9]{0,40}(e[-+][0-9]{1,3})?|\.inf|\.nan)", re.IGNORECASE)
KEYS = ("str", "int", "merge")
SCALARS = ("str", "int", "float", "bool", "null")


def read_yaml(path: Path) -> Any:
    """Read and check a YAML file.

    Returns:
        Dicts, lists and scalars. None for an empty file.

    Raises:
        RecipeError: the file cannot be read, is too large, or has YAML that this module refuses. The message names file
            and line.
    """
    where = named(str(path), 300)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{where} has more than {MAX_BYTES // 1024} KiB, which no recipe needs")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} is not YAML: byte {error.start} is not UTF-8") from None
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """Read and check a YAML text. Returns None if it is empty.

    Args:
        where: name of the text, for messages.

    Raises:
        RecipeError: the text is not YAML, or has YAML that `qattn_hf.recipes.yaml_reader` refuses.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node)
        return loader.construct_document(node)
    except _Refused as error:
        raise RecipeError(f"{where}, {error}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets errors of `chr` and `int` through
        raise RecipeError(f"{where} is not YAML: {_one_line(error)}") from None
    except RecursionError:
        raise RecipeError(f"{where}: too little of Python's stack is left here to read it") from None


def _one_line(error: Exception) -> str:
    """Format a YAML error in one line, with line and column."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return cut(" ".join(str(error).split()), 500)
    message = ", ".join(part for part in (error.context, error.problem) if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: {cut(message, 500)}"


class _Refused(Exception):
    """YAML that `qattn_hf.recipes.yaml_reader` refuses, with its line."""

    def __init__(self, at: yaml.Node | yaml.Event, problem: str):
        assert at.start_mark is not None  # the loader marks everything it makes
        super().__init__(f"line {at.start_mark.line + 1}: {problem}")


class _Loader(yaml.SafeLoader):
    """Loader that refuses tags, deep nesting and too many values while it reads."""

    depth = nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if (tag := getattr(event, "tag", None)) is not None:
            tag = named(tag.replace("tag:yaml.org,2002:", "!!"))
            raise _Refused(event, f"the tag {tag}: a recipe has none; leave it out, and put text in quotes")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _Refused(event, f"these are more than {MAX_NODES} keys and values")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused(event, f"lists and mappings are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _check(root: yaml.Node) -> None:
    """Check all keys and values, with each alias expanded."""
    pending, nodes = [(root, 1)], 0
    while pending:
        node, depth = pending.pop()
        nodes += 1
        if nodes > MAX_NODES:
            raise _Refused(root, f"with its aliases written out it holds more than {MAX_NODES} keys and values")
        if depth > MAX_DEPTH:
            raise _Refused(node, f"an anchor holds itself, or aliases nest more than {MAX_DEPTH} deep")
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            nodes += len(node.value)
            pending += [(value, depth + 1) for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(value, depth + 1) for value in node.value]
        else:
            _check_scalar(node, SCALARS)


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _Refused(key, "a list or a mapping as a key; keys are names")
        _check_scalar(key, KEYS)
        if key.value in lines:
            first = f"first in line {lines[key.value]}"
            raise _Refused(key, f"{named(key.value)} is given twice, {first}; keep one of them")
        lines[key.value] = key.start_mark.line + 1


def _check_scalar(node: yaml.Node, kinds: tuple[str, ...]) -> None:
    kind, value = node.tag.rpartition(":")[2], named(node.value)
    way_out = "put it in quotes if it is text"
    if kind not in kinds:
        what = "key" if kinds is KEYS else "value"
        raise _Refused(node, f"YAML reads the {what} {value} as {kind}; {way_out}")
    if kind in ("int", "float") and not NUMBER.fullmatch(node.value):
        raise _Refused(node, f"{value}: numbers are plain decimals, such as 64 or 1.0e-4; {way_out}")
