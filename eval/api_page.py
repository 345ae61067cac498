"""`docs/api.md`: every public name of `qattn_hf` with its signature and docstring, and its public modules."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import qattn_hf

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example):\s*$")
ITEM = re.compile(r"^ {4}(?P<name>[\w*, ]+): (?P<text>.*)$")


def api_table(results: Path) -> str:
    """The entries of all public names: functions, classes, modules."""
    things = {name: getattr(qattn_hf, name) for name in qattn_hf.__all__ if not name.startswith("__")}
    order = sorted(things, key=lambda x: (inspect.ismodule(things[x]), inspect.isclass(things[x]), x.lower()))
    return "\n\n".join((module if inspect.ismodule(things[x]) else entry)(x, things[x]) for x in order)


def module(name: str, thing: Any) -> str:
    """A public module: its docstring, and a line for each of its names."""
    lines = [
        f"- `{key}`: {(inspect.getdoc(getattr(thing, key)) or '').partition(chr(10))[0]}"
        for key in thing.__all__
        if callable(getattr(thing, key))
    ]
    return "\n\n".join([f"## {name}", f"Module `qattn_hf.{name}`. {inspect.getdoc(thing)}", "\n".join(lines)])


def entry(name: str, thing: Any) -> str:
    """One name: signature, docstring, and of a class its own public methods."""
    parts = [f"## {name}", signature(name, thing), as_markdown(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        parts += [
            f"**`{name}.{key}`**\n\n{as_markdown(inspect.getdoc(member) or '')}" for key, member in members(thing)
        ]
    return "\n\n".join(part for part in parts if part)


def signature(name: str, thing: Any) -> str:
    """As Python shows it; errors have none worth showing."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return ""
    found = str(inspect.signature(thing))
    short = re.sub(r"(?:\w+\.)+(?=\w)", "", found).replace("'", "")
    return f"```python\n{name}{short}\n```"


def members(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties with a docstring that the class defines itself."""
    found = []
    for key, member in vars(kind).items():
        inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not key.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)) and inner.__doc__:
            found.append((key, inner))
    return found


def as_markdown(text: str) -> str:
    """A docstring whose sections `Args:`, `Raises:`, ... become bold lines, and their entries lists."""
    lines: list[str] = []
    section = False
    for line in text.splitlines():
        if title := SECTION.match(line):
            section = True
            lines += [f"**{title[1]}**", ""]
        elif section and (item := ITEM.match(line)):
            names = ", ".join(f"`{name.strip()}`" for name in item["name"].split(","))
            lines.append(f"- {names}: {item['text']}")
        elif section and line.strip():
            lines.append(f"  {line.strip()}" if lines[-1].startswith(("- ", "  ")) else line.strip())
        else:
            section = section and not line.strip()
            lines.append(line)
    return "\n".join(lines).strip()
