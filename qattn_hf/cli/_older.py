"""Command lines of release 0.1 are read in today's grammar, and a note on stderr says what to type."""

from __future__ import annotations

import shlex
import sys

COMMANDS = {"warm": ["doctor", "--compile"], "check": ["doctor"], "report": ["cache", "report"]}
GROUPS = ("bench", "cache")
OPTIONS = {
    "--methods": "--method",
    "--candidate": "--method",
    "--plot": "--picture",
    "--batch-size": "--batch",
    "--kv-mib": "--kv-memory",
    "--max-body-mib": "--max-body",
}
UNITS = {"--gpu-memory": "GiB", "--weights": "GiB", "--kv-mib": "MiB", "--max-body-mib": "MiB"}
MODEL = ("--model", "-m")
OUTPUT = ("--output", "-o")
SPLIT = {*OPTIONS, *UNITS, "--model", "--output", "--json", "--rollout"}  # `--model=X` is read as `--model X`


def in_todays_grammar(arguments: list[str]) -> list[str]:
    """The arguments of `qattn` in today's grammar.

    A note on stderr names today's command line where the given one is older.
    """
    first = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    words = [part for word in arguments[first:] for part in _parts(word)]
    command, rest = _command(words)
    today = [*command, *_model_first(_options(command, rest))]
    if words == today:
        return arguments
    print(f"note: the next release refuses this older spelling. Type: qattn {shlex.join(today)}", file=sys.stderr)
    return [*arguments[:first], *today]


def _parts(word: str) -> list[str]:
    name, _, value = word.partition("=")
    return [name, value] if name in SPLIT and value else [word]


def _command(words: list[str]) -> tuple[list[str], list[str]]:
    """Today's command, one word or two, and the words that follow."""
    if words[:1] == ["compare"] and "--rollout" in words:
        return ["rollout"], words[1:]
    count = 2 if words[:1] and words[0] in GROUPS else 1
    command = words[:2] if count == 2 else [today for name in words[:1] for today in COMMANDS.get(name, [name])]
    if command[1:] == ["--compile"]:
        return command[:1], [*words[1:], "--compile"]
    return command, words[count:]


def _option(command: list[str], before: str, word: str, after: str) -> str:
    """Today's name of an option, or a size with its unit, between its neighbours."""
    if before in UNITS and word.replace(".", "").isdecimal():
        return word + UNITS[before]
    if command == ["rollout"] and word == "--rollout":
        return "--new-tokens"
    if command == ["inspect"] and word in OUTPUT and not after.endswith(".json"):
        return "--pictures"
    if command in (["demo"], ["inspect"]) and word == "--json" and after.endswith(".json"):
        return "--output"
    return OPTIONS.get(word, word)


def _options(command: list[str], words: list[str]) -> list[str]:
    """Today's names of options, and units of sizes."""
    found = [
        _option(command, before, word, after)
        for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False)
    ]
    if command == ["generate"] and not {"--prompt", "-p"} & {word.partition("=")[0] for word in found}:
        place = _first_argument(found)
        found[place:place] = ["--prompt"] if place < len(found) else []
    return found


def _first_argument(words: list[str]) -> int:
    """Index of the first word of `generate` that is neither an option nor the value of an option."""
    i = 0
    while i < len(words) and words[i].startswith("-"):
        i += 1 if words[i] in ("--chat", "--help") or "=" in words[i] else 2
    return min(i, len(words))


def _model_first(words: list[str]) -> list[str]:
    """The words with the value of `--model` as the first argument."""
    for i, word in enumerate(words[:-1]):
        if word in MODEL:
            return [words[i + 1], *words[:i], *words[i + 2 :]]
    return words
