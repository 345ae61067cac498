"""Tables of test runs: transformers' causal types and tests, quantized weights, tests and sanitizers on GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from recorded import Result
from table import Row, Table

RESULTS = {
    "runs": "all layers packed",
    "part": "some layers packed",
    "own": "no layer packed, runs",
    "refused": "refused",
    "stock": "not built, or does not generate without `patch`",
    "error": "fails",
}
SERVED = ("runs", "part", "own")
SHORT = {
    "is_causal=False": "encoders: attention in both directions",
    "attention interface": "no attention interface of transformers",
    "between its cache and its attention": "changes keys or values between cache and attention",
    "the config has encoder": "encoder and decoder of different sizes",
    "no attention, so": "no attention",
    "cross attention": "cross attention",
    "beyond causal": "special masks, beyond causal",
}
ALONE = {  # why a type that runs is not served with other requests
    "runs": "served together",
    "linear attention or SSM": "linear attention or SSM",
    "convolution": "convolutions",
    "latent attention": "latent attention (MLA)",
    "one length of all rows": "asks its cache for one length of all rows",
    "KV heads": "KV heads that its config does not name",
    "several times": "calls its layers several times for each token",
}
OUTCOMES = ("passed", "refused", "failed")  # of transformers' own tests with a method
KEYS = {"family", "test", "stock", "reason", "why"}  # the other keys of a row are methods, with the outcome
SHORTEST = re.compile(r"[:;,(]| {2,}")  # where the first words of a refusal end


def _types(results: list[Result]) -> Iterable[Row]:
    """One row for each result and its reason, which names no type; the line before says how many run."""
    for found in results:
        rows = found["rows"]
        served = sum(row["result"] in SERVED for row in rows)
        intro = (
            f"{served} of {len(rows)} types run and generate the stock model's tokens (transformers "
            f"{found['versions']['transformers']}, `{found['command']}`)."
        )
        groups: dict[tuple[str, str], list[str]] = {}
        for row in sorted(rows, key=lambda row: list(RESULTS).index(row["result"])):
            groups.setdefault((RESULTS[row["result"]], _why(row)), []).append(f"`{row['model_type']}`")
        for (result, why), types in groups.items():
            yield {"intro": intro, "result": result, "why": why, "n": len(types), "types": ", ".join(types)}


def _why(row: Row) -> str:
    """Return why a type is refused, without its name, or the kinds of layers that are not packed."""
    if row["result"] in ("part", "own"):
        return ", ".join(kind for kind in row["layers"] if kind not in ("full_attention", "hybrid"))
    if row["result"] != "refused":
        return row.get("reason", "") if row["result"] == "error" else ""
    reason = row["reason"].replace(row["model_type"], "it").split(";")[0]
    return next((short for name, short in SHORT.items() if name in reason), reason.removeprefix("it "))


def _batching(results: list[Result]) -> Iterable[Row]:
    """One row for each answer of continuous batching; the line before says how many types it serves."""
    for found in results:
        served = [row for row in found["rows"] if row["result"] in SERVED]
        together = sum(row["batching"] == "runs" for row in served)
        intro = f"Continuous batching serves {together} of these {len(served)} types."
        groups: dict[str, list[str]] = {}
        for row in sorted(served, key=lambda row: row["batching"] != "runs"):
            why = next((short for name, short in ALONE.items() if name in row["batching"]), row["batching"])
            groups.setdefault(why, []).append(f"`{row['model_type']}`")
        for why, types in groups.items():
            yield {"intro": intro, "why": why, "n": len(types), "types": ", ".join(types)}


def _weights(results: list[Result]) -> Iterable[Row]:
    """Kinds of quantized weights: packages, how each was loaded, and whether all that was asked held."""
    for found in results:
        device = found["device"].split(",")[0]
        intro = f"transformers {found['versions']['transformers']}, {device}, `{found['command']}`:"
        for row in found["rows"]:
            wrong = [name for name, holds in row.get("results", {}).items() if not holds]
            held = row.get("reason") or (f"fails: {', '.join(wrong)}" if wrong else "as float weights")
            packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
            yield row | {"intro": intro, "versions": packages, "held": held}


def _own_tests(results: list[Result]) -> Iterable[Row]:
    """A row for each family and method: how many tests pass, are refused and fail."""
    for found in results:
        heads = [row for row in found["rows"] if "tests_of" in row]
        rows = [row for row in found["rows"] if row.get("stock") == "passed"]
        intro = (
            f"Tests of transformers {heads[0]['tests_of']} over transformers {found['versions']['transformers']}, "
            f"`{found['command']}`. {len(rows)} tests pass with stock models and count; "
            f"{len(found['rows']) - len(heads) - len(rows)} do not apply: skipped by transformers, or failing without "
            "us. Of each method: passed, refused, failed."
        )
        for family in dict.fromkeys(row["family"] for row in rows):
            of = [row for row in rows if row["family"] == family]
            for method in (key for key in rows[0] if key not in KEYS):
                counts = (sum(row[method] == outcome for row in of) for outcome in OUTCOMES)
                shown = {"family": family, "tests": len(of), "method": method, "counts": " / ".join(map(str, counts))}
                yield {"intro": intro, **shown}


def _refusals(results: list[Result]) -> Iterable[Row]:
    """One line a reason: its first words, how many tests of all families it refuses, and their names."""
    tests: dict[str, set[tuple[str, str]]] = {}
    for row in (row for found in results for row in found["rows"] if row.get("stock") == "passed"):
        for reason in row["why"].values():
            tests.setdefault(SHORTEST.split(reason)[0].strip(), set()).add((row["family"], row["test"]))
    for words, found in tests.items():
        which = sorted({test.split(".test_")[1] for _, test in found})
        yield {"words": words, "n": len(found), "which": ", ".join(f"`{name}`" for name in which)}


COUNTS = Table(
    "own-tests",
    "transformers-tests",
    "| family | tests || `{method}` |",
    "| `{family}` | {tests} || {counts} |",
    _own_tests,
    "method",
    split="{intro}",
)
REFUSALS = Table(
    "refusals", "transformers-tests", "| refused with | tests | which |", "| {words} | {n} | {which} |", _refusals
)


def own_tests_table(results: Path) -> str:
    """How many of transformers' tests pass with each method, and which are refused, with the reason."""
    return "\n\n".join(dict.fromkeys(table(results) for table in (COUNTS, REFUSALS)))


def _gpu_runs(results: list[Result]) -> Iterable[Row]:
    """Passed, skipped and failed tests, or settings of a sanitizer whose outputs were finite: it fails at a finding."""
    for found in results:
        said = [row.get("outcome", "passed" if row.get("finite") else "failed") for row in found["rows"]]
        counts = {outcome: said.count(outcome) for outcome in ("passed", "skipped", "failed")}
        yield {**found, **found["versions"], **counts}


TABLES = (
    Table("types", "models",
          "| result | why, or what is not packed | types | which |",
          "| {result} | {why} | {n} | {types} |",
          _types, split="{intro}"),
    Table("batching-types", "models",
          "| requests | types | which |",
          "| {why} | {n} | {types} |",
          _batching, split="{intro}"),
    Table("quantized-weights", "quantized-weights",
          "| weights | packages | loaded | under a packed cache |",
          "| {weights} | {versions} | {loaded} | {held} |",
          _weights, split="{intro}"),
    Table("gpu-runs", "gpu-tests* sanitizers",
          "| record | GPU | transformers | triton | passed | skipped | failed |",
          "| `{name}` | {device} | {transformers} | {triton} | {passed} | {skipped} | {failed} |",
          _gpu_runs),
)  # fmt: skip
