"""Recorded results as Markdown: what the makers of tables share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qattn_hf.methods import get_method

Result = dict[str, Any]
# What the quality measurement reports of a method; every other key of a row is one of the method's settings.
FIGURES = {
    "model", "method", "kl", "same_top1", "ppl", "ppl_change_pct", "se_pct", "packed_tokens", "effective_bits",
    "effective_bits_total", "kv_bytes", "impl", "sums", "recall", "sums_lost_won", "recall_lost_won", "head_dim",
    "kv_heads", "tokens",
}  # fmt: skip
SHOWN = ("torch", "transformers", "triton")  # versions that a page names
SPELLED = ("method", "way", "setting", "recipe", "parent")  # keys of rows that spell a method with its settings
APART = ("quality-", "bits")  # begins of the names of records whose rows have settings as keys of their own
SAME = {"turbo_sink": "turbo"}  # recipes that are a method's defaults


def load(results: Path, prefix: str) -> list[Result]:
    """Recorded results whose name starts with `prefix`, by name, with settings spelled as they are today."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"{prefix}*.json"))]
    return [spelled_now(result) for result in found]


def spelled_now(result: Result) -> Result:
    """A record whose `defaults` name methods that had others then, `{"turbo": {"sink_num": 0, "sink_window": 0}}`, with
    rows that say so: what was `turbo` is `turbo:sink_num=0`, what was `turbo:sink_num=3,sink_window=8` is `turbo`."""
    for method, former in result.get("defaults", {}).items():
        apart = result["name"].startswith(APART)
        result["rows"] = [_row_now(row, method, former, apart) for row in result["rows"]]
    return result


def _row_now(row: Result, method: str, former: dict[str, Any], apart: bool) -> Result:
    if apart and row["method"] == method:
        own = settings(row)
        return {key: value for key, value in row.items() if key not in own} | _given_now(own, method, former)
    spelled = {key: _text_now(row[key], method, former) for key in SPELLED if isinstance(row.get(key), str)}
    return row | spelled


def _text_now(text: str, method: str, former: dict[str, Any]) -> str:
    """`turbo:bits=2 graph`, as commands take a method, with what may follow behind a space."""
    spelled, *rest = text.split(" ")
    name, _, settings_text = spelled.partition(":")
    if name in SAME:
        return " ".join([SAME[name], *rest]) if not settings_text else text
    if name != method:
        return text
    given = dict(pair.split("=", 1) for pair in settings_text.split(",") if pair)
    now = ",".join(f"{key}={value}" for key, value in _given_now(given, method, former).items())
    return " ".join([f"{name}:{now}" if now else name, *rest])


def _given_now(given: dict[str, Any], method: str, former: dict[str, Any]) -> dict[str, Any]:
    """Settings that have to be given today for what was meant; those of a pool that is not there are left out."""
    meant = {**given, **{key: value for key, value in former.items() if key not in given}}
    if str(meant.get("sink_num")) == "0":
        meant = {key: value for key, value in meant.items() if key == "sink_num" or not key.startswith("sink_")}
    today = get_method(method).model_fields
    return {key: value for key, value in meant.items() if key not in former or str(value) != str(today[key].default)}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(results: Path, *prefixes: str) -> str:
    """One line for a page: on what its figures were recorded; notes of single records follow as a list.

    Commands, versions and dates of each record stand in its JSON file.
    """
    found = [result for prefix in prefixes for result in load(results, prefix)]
    if not found:
        return "Not measured yet."
    dates: dict[str, list[str]] = {}
    for result in found:
        used = [f"{name} {result['versions'][name]}" for name in SHOWN if result["versions"].get(name)]
        dates.setdefault(", ".join([result["device"], *used]), []).append(result["date"])
    where = "; ".join(f"{name} ({_days(days)})" for name, days in dates.items())
    files = ", ".join(f"`eval/results/{prefix}*.json`" for prefix in prefixes)
    notes: dict[str, list[str]] = {}
    for result in found:
        if "note" in result:
            notes.setdefault(result["note"], []).append(f"`{result['name']}`")
    listed = [f"- {', '.join(names)}: {note}." for note, names in notes.items()]
    return "\n".join([f"Recorded on {where}. Commands and versions: {files}.", *(["", *listed] if listed else [])])


def _days(dates: list[str]) -> str:
    first, last = min(dates), max(dates)
    return first if first == last else f"{first} to {last}"


def settings(row: dict[str, Any]) -> dict[str, Any]:
    """Those of the method, among the figures of a row of quality or of bits."""
    return {key: value for key, value in row.items() if key not in FIGURES}


def asked(row: dict[str, Any]) -> str:
    """`turbo`, or `turbo:k_bits=4,v_bits=2`: as the commands take it."""
    given = ",".join(f"{key}={_as_yaml(value)}" for key, value in settings(row).items())
    return f"{row['method']}:{given}" if given else row["method"]


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
