"""YAML as recipes and families use it: text, numbers, true, false, null, lists, mappings, anchors and merge keys.

YAML allows more than that, and some of it is a trap: of a key given twice the last would win, `1:30` is 90, `010` is 8,
a few aliases of aliases hold more values than a machine has memory. All that is refused, by name and line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from qattn_hf.errors import RecipeError
from qattn_hf.messages import cut, named

LARGEST = 2**18  # bytes of a file; lists of heads of 126 layers with 64 heads take an eighth of it
DEEPEST = 32  # lists and mappings in one another
MOST = 50_000  # keys and values, every alias counted as what it stands for
NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17}|[0-9]{0,40}\.[0-9]{0,40}(e[-+][0-9]{1,3})?|\.inf|\.nan)", re.IGNORECASE)
KEYS = ("str", "int", "merge")
SCALARS = ("str", "int", "float", "bool", "null")


def read_yaml(path: Path) -> Any:
    """The data of a file.

    Raises:
        RecipeError: the file cannot be read, or is more or other than the module says; the message names file and line.
    """
    where = named(str(path), 300)
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST:
        raise RecipeError(f"{where} has more than {LARGEST // 1024} KiB, which no recipe needs")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} is not YAML: byte {error.start} is not UTF-8") from None
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """The data of a text; None if it holds none.

    Args:
        where: what a message calls the text.

    Raises:
        RecipeError: the text is not YAML, or more or other than the module says.
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
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets those of `chr` and `int` through
        raise RecipeError(f"{where} is not YAML: {_said(error)}") from None
    except RecursionError:
        raise RecipeError(f"{where}: too little of Python's stack is left here to read it") from None


def _said(error: Exception) -> str:
    """Its message in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return cut(" ".join(str(error).split()), 500)
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: {cut(said, 500)}"


class _Refused(Exception):
    """YAML that is not read."""

    def __init__(self, at: yaml.Node | yaml.Event, problem: str):
        assert at.start_mark is not None  # the loader marks all it makes
        super().__init__(f"line {at.start_mark.line + 1}: {problem}")


class _Loader(yaml.SafeLoader):
    """Refuses tags, and stops before nesting or the number of values does harm."""

    depth = seen = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if (tag := getattr(event, "tag", None)) is not None:
            tag = named(tag.replace("tag:yaml.org,2002:", "!!"))
            raise _Refused(event, f"the tag {tag}: a recipe has none; leave it out, and put text in quotes")
        self.seen += 1
        if self.seen > MOST:
            raise _Refused(event, f"these are more than {MOST} keys and values")
        self.depth += 1
        if self.depth > DEEPEST:
            raise _Refused(event, f"lists and mappings are nested more than {DEEPEST} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _check(root: yaml.Node) -> None:
    """Walk through all values as if each alias were written out."""
    left, seen = [(root, 1)], 0
    while left:
        node, depth = left.pop()
        seen += 1
        if seen > MOST:
            raise _Refused(root, f"with its aliases written out it holds more than {MOST} keys and values")
        if depth > DEEPEST:
            raise _Refused(node, f"an anchor holds itself, or aliases nest more than {DEEPEST} deep")
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            seen += len(node.value)
            left += [(value, depth + 1) for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            left += [(value, depth + 1) for value in node.value]
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
