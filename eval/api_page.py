"""Pages made of docstrings and help texts: `docs/api.md` (public names of `qattn_hf`), `docs/cli.md` (commands)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

import qattn_hf
from qattn_hf.cli import app

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example):\s*$")
ITEM = re.compile(r"^ {4}(?P<name>[\w*, ]+): (?P<text>.*)$")


def api_table(results: Path) -> str:
    """The entries of all public names: functions, classes, modules."""
    things = {name: getattr(qattn_hf, name) for name in qattn_hf.__all__ if not name.startswith("__")}
    order = sorted(things, key=lambda x: (inspect.ismodule(things[x]), inspect.isclass(things[x]), x.lower()))
    return "\n\n".join((module if inspect.ismodule(things[x]) else entry)(x, things[x]) for x in order)


def module(name: str, thing: Any) -> str:
    """A public module: its docstring, its source, and a line for each of its names."""
    lines = [
        f"- `{key}`: {(inspect.getdoc(getattr(thing, key)) or '').partition(chr(10))[0]}"
        for key in thing.__all__
        if callable(getattr(thing, key))
    ]
    about = f"Module `qattn_hf.{name}`. {inspect.getdoc(thing)}"
    return "\n\n".join([f"## {name}", about, source(thing), "\n".join(lines)])


def entry(name: str, thing: Any) -> str:
    """One name: signature, docstring and source, and the public methods that a class defines itself."""
    parts = [f"## {name}", signature(name, thing), as_markdown(inspect.getdoc(thing) or ""), source(thing)]
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


def source(thing: Any) -> str:
    """A link to the file that defines `thing`. Its title is the name; the built site turns that into a line."""
    file = Path(inspect.getsourcefile(thing) or "").resolve().relative_to(ROOT).as_posix()
    title = "" if inspect.ismodule(thing) else f' "{thing.__name__}"'
    return f"[Source](../{file}{title})"


def members(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties with a docstring that the class defines itself, without internal ones."""
    found = []
    for key, member in vars(kind).items():
        inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        about = inner.__doc__ if inspect.isfunction(inner) or isinstance(inner, property) else None
        if about and not key.startswith("_") and not about.startswith("Internal: "):
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


def cli_table(results: Path) -> str:
    """Every command of `qattn`: its help text and its options, in the order of `qattn --help`."""
    return "\n\n".join(command_entry(name, command, context) for name, command, context in commands())


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Each command that runs something: its whole name, the command and the context that its help needs."""
    waiting = [("qattn", get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command, command.make_context(name, [], resilient_parsing=True)
        else:
            waiting[:0] = [(f"{name} {key}", inner[key]) for key in inner if not inner[key].hidden]


def command_entry(name: str, command: Any, context: Any) -> str:
    """A command: what it does, its examples as one block, and a table of its arguments and options."""
    text = re.sub(r"\s*Examples?:\s+(?=qattn )", "\n\n", inspect.cleandoc(command.help or ""))
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    examples = [part for part in paragraphs if part.startswith("qattn ") and ", " not in part]
    about = [part for part in paragraphs if part not in examples]
    params = sorted(command.get_params(context), key=lambda param: param.param_type_name != "argument")
    records = [record for param in params if (record := param.get_help_record(context))]
    # Markdown shows a backslash inside code, so choices have commas between instead of escaped bars
    named = [(option.replace("|", ", "), text) for option, text in records if not option.startswith("--help")]
    rows = [f"| `{cell(option)}` | {cell(text)} |" for option, text in named]
    parts = [f"## {name}", *about]
    if examples:
        parts.append("\n".join(["```bash", *examples, "```"]))
    if rows:
        parts.append("\n".join(["| option | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(part for part in parts if part)


def cell(text: str) -> str:
    """Text as a cell of a table: on one line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")
