"""Run a measurement and keep what it printed: `python eval/record.py NAME -- COMMAND...`.

The command prints one JSON object per line; other lines are shown and dropped. All rows go to `eval/results/NAME.json`
with the command, the date, the versions and the device. `eval/tables.py` makes the tables of README and docs from them.

`NAME:RUN` records one of several runs in a file and replaces an earlier run of that name. A command that fails or
prints no row leaves the old file unchanged. With `--failed`, the rows of a failing command are kept with its exit code;
rows of tests say which test failed. So are the rows that were printed before SIGTERM, as from `timeout`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def portable(text: str) -> str:
    """`text` with its absolute paths made relative to the repository, or cut to the file's name when far from it."""

    def shorten(match: re.Match[str]) -> str:
        path = os.path.relpath(match.group(), ROOT)
        return os.path.basename(match.group().rstrip("/")) if path.startswith("../..") else path

    return re.sub(r"(?<![\w./~:-])/(?:[\w.+-]+/)*[\w.+-]+/?", shorten, text)


def portable_value(value: Any) -> Any:
    """The same for every string inside a JSON value."""
    if isinstance(value, dict):
        return {key: portable_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable_value(item) for item in value]
    return portable(value) if isinstance(value, str) else value


def run(command: list[str], failed: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Run `command` and show its output. Return its JSON objects and its exit code.

    Unless `failed`, a failing command ends this script. SIGTERM is passed on. `python` is the interpreter that runs
    this script, so the recorded versions are those of the command.
    """
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        for line in process.stdout:
            print(line, end="", flush=True)
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode  # of a signal, as in a shell
    if code and not failed:
        sys.exit(f"record: the command ended with {code}; nothing was written")
    if not rows:
        sys.exit("record: the command printed no JSON row; nothing was written")
    return rows, code


def as_text(head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The result as JSON with one line a row, so that a change of figures is easy to see."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return json.dumps(head, indent=1).removesuffix("\n}") + ',\n "rows": [\n' + lines + "\n ]\n}\n"


def with_run(target: Path, run: dict[str, Any]) -> str:
    """Return the text of a file of runs with `run` added, or in place of the run with its name.

    Raises:
        SystemExit: the file has one run without a name.
    """
    found = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {"runs": []}
    if "runs" not in found:
        sys.exit(f"record: {target.name} has one run without a name: remove it first, or record {target.stem}")
    runs = {one["run"]: one for one in found["runs"]} | {run["run"]: run}
    texts = (as_text({key: one[key] for key in one if key != "rows"}, one["rows"]) for one in runs.values())
    return f'{{\n "name": "{target.stem}",\n "runs": [\n' + ",\n".join(map(str.rstrip, texts)) + "\n ]\n}\n"


def write(folder: Path, name: str, head: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write a result; runs of one file that end at once wait for each other."""
    record, _, run = name.partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{record}.json"
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = with_run(target, {"run": run, **head, "rows": rows}) if run else as_text({"name": name, **head}, rows)
        target.write_text(text, encoding="utf-8")
    finally:
        os.close(lock)
    return target


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run a measurement and keep its JSON rows in eval/results/NAME.json.")
    parser.add_argument("name", help="name of the result, for instance speed-decode, or RECORD:RUN")
    parser.add_argument("command", nargs="+", help="the command, after --")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--failed", action="store_true", help="record what a failing command printed, and fail like it")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+(:[\w.-]+)?", options.name):
        parser.error(f"NAME is a file name of letters, digits, '.', '_' and '-', or two with ':', not {options.name!r}")
    rows, code = run(options.command, options.failed)
    from qattn_hf.messages.origin import origin  # takes a second, which a command that fails need not wait for

    command = [Path(options.command[0]).name, *options.command[1:]]
    head = {**origin(portable(" ".join(command))), **({"exit_code": code} if code else {})}
    target = write(options.results, options.name, head, portable_value(rows))
    print(f"record: {len(rows)} rows in {portable(str(target))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
