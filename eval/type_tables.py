"""Tables of transformers' causal types and of quantized weights, made of `eval/results/`."""

from __future__ import annotations

from pathlib import Path

from recorded import Result, load, markdown

RESULTS = {
    "runs": "all layers packed",
    "part": "some layers packed",
    "own": "no layer packed, runs",
    "refused": "refused",
    "stock": "not built, or does not generate without `patch`",
    "error": "fails",
}
SERVED = ("runs", "part", "own")


def types_table(results: Path) -> str:
    """How many types run, and which: one row for each result and its reason, which names no type."""
    found = next((result for result in load(results, "models") if result["name"] == "models"), None)
    if found is None:
        return "Not measured yet."
    rows = found["rows"]
    served = sum(row["result"] in SERVED for row in rows)
    groups: dict[tuple[str, str], list[str]] = {}
    for result in RESULTS:
        for row in rows:
            if row["result"] == result:
                groups.setdefault((RESULTS[result], _why(row)), []).append(row["model_type"])
    lines = [
        [result, why, str(len(types)), ", ".join(f"`{t}`" for t in types)] for (result, why), types in groups.items()
    ]
    intro = (
        f"{served} of {len(rows)} types run and generate the stock model's tokens (transformers "
        f"{found['versions']['transformers']}, `{found['command']}`)."
    )
    return f"{intro}\n\n{markdown(['result', 'why, or what is not packed', 'types', 'which'], lines)}"


def weights_table(results: Path) -> str:
    """Kinds of quantized weights: packages, how each was loaded, and whether all that was asked held."""
    found = next(iter(load(results, "quantized-weights")), None)
    if found is None:
        return "Not measured yet."
    lines = []
    for row in found["rows"]:
        packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
        wrong = [name for name, holds in row.get("results", {}).items() if not holds]
        held = row.get("reason") or (f"fails: {', '.join(wrong)}" if wrong else "as float weights")
        lines.append([row["weights"], packages, row["loaded"], held])
    intro = f"transformers {found['versions']['transformers']}, {found['device'].split(',')[0]}, `{found['command']}`:"
    return f"{intro}\n\n{markdown(['weights', 'packages', 'loaded', 'under a packed cache'], lines)}"


def _why(row: Result) -> str:
    """The reason of a refusal without the type's name; of what runs, the kinds of layers that are not packed."""
    if row["result"] in ("part", "own"):
        return ", ".join(kind for kind in row["layers"] if kind not in ("full_attention", "hybrid"))
    if row["result"] != "refused":
        return row.get("reason", "") if row["result"] == "error" else ""
    reason = row["reason"].replace(row["model_type"], "it").split(";")[0]
    for name, short in SHORT.items():
        if name in reason:
            return short
    return reason.removeprefix("it ")


SHORT = {
    "is_causal=False": "encoders: attention in both directions",
    "attention interface": "no attention interface of transformers",
    "between its cache and its attention": "changes keys or values between cache and attention",
    "the config has encoder": "encoder and decoder of different sizes",
    "no attention, so": "no attention",
    "cross attention": "cross attention",
    "beyond causal": "masks of its own, beyond causal",
}
