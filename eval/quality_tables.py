"""Tables of recipes compared with their parents, and of size: `recipes-*` and `bits*`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recorded import asked, load, markdown

# How many times smaller a cache gets by a paper: where it says so, the figure, its setting, ours as `label` names it,
# and why the two differ. All of head dim 128, as most of the papers' models have.
CLAIMS = [
    (
        "TurboAttention, abstract", "over 4.4x", "none named; its main results are of 4 bits", "`turbo:sink_num=0`",
        "4.4x is 3.64 bits, less than 4-bit codes alone",
    ),
    (
        "TurboAttention, abstract", "over 4.4x", "none named; or its mixed, half of the heads in 2 bits",
        "`turbo:bits=mixed,sink_num=0`", "holds once the INT8 buffer weighs little",
    ),
    (
        "SinkQ, abstract and 4.3", "6.4x", "2 bits, G 128, long contexts", "`sinkq`",
        "codes, steps and minima are 7.1x; theirs is the slope of peak memory, ours counts open tokens and pool",
    ),
    (
        "SinkQ, 4.3", "about 5.0x", "2 bits, G 32, long contexts", "`sinkq:group_size=32`",
        "the same, of 5.3x",
    ),
    (
        "SinkQ, 4.3, names no method", "about 5.0x", "2 bits, G 32, long contexts", "`kivi:bits=2`",
        "the same, with 128 newest tokens open instead of 32 and no pool",
    ),
    (
        "Sparse V, 2.1", "4.6x", "turbo3, 14 bytes for 32 values", "`turboquant:k_format=turbo3,v_format=turbo3`",
        "holds once the 128 newest tokens weigh little",
    ),
]  # fmt: skip


def label(row: dict[str, Any]) -> str:
    """`turbo`, or `turbo:k_bits=4,v_bits=2`, as the commands take it."""
    return "full precision" if row["method"] == "fp" else f"`{asked(row)}`"


def recipes_table(results: Path) -> str:
    """Recipes compared with the settings that they are made of: KL, its paired difference, and all bits a value."""
    parts = []
    for result in load(results, "recipes"):
        header = ["model", "recipe", "compared with", "KL", "its KL", "difference", "bits, all", "its bits"]
        rows = [
            [
                row["model"],
                f"`{row['recipe']}`",
                f"`{row['parent']}`",
                *(f"{row[name]:.6f}" for name in ("kl", "parent_kl")),
                f"{row['change']:+.6f} ({row['se']:.6f})",
                *(f"{row[name]:.3f}" for name in ("bits", "parent_bits")),
            ]
            for row in result["rows"]
        ]
        parts.append(markdown(header, rows))
    return "\n\n".join(parts) or "Not measured yet."


def bits_table(results: Path) -> str:
    """Bits of one cached value: in closed blocks, and of the whole cache (open tokens and spare room counted)."""
    rows = [row for result in load(results, "bits") for row in result["rows"]]
    lengths = sorted({row["tokens"] for row in rows})
    groups: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((label(row), row["head_dim"]), {})[row["tokens"]] = row
    header = ["cache", "head dim", "closed blocks", *(f"all, {length} tokens" for length in lengths)]
    lines = [
        [
            name,
            str(head_dim),
            f"{by_length[max(by_length)]['effective_bits']:.3f}",
            *(f"{by_length[n]['effective_bits_total']:.3f}" if n in by_length else "" for n in lengths),
        ]
        for (name, head_dim), by_length in groups.items()
    ]
    return markdown(header, lines) if lines else "Not measured yet."


def claimed_table(results: Path) -> str:
    """How many times smaller than with 16 bits a value: what papers claim, and ours by what the tensors hold."""
    rows = [row for result in load(results, "bits") for row in result["rows"] if row["head_dim"] == 128]
    found = {(label(row), row["tokens"]): row for row in rows}
    lengths = sorted({tokens for _, tokens in found if tokens >= 4096})  # the claims are of long contexts
    header = ["paper", "claimed", "of", "ours", "closed blocks", *(f"all, {n} tokens" for n in lengths)]
    lines = [
        [
            *claim,
            f"{16 / found[claim[3], lengths[-1]]['effective_bits']:.2f}x",
            *(f"{16 / found[claim[3], n]['effective_bits_total']:.2f}x" for n in lengths),
            why,
        ]
        for *claim, why in CLAIMS
        if lengths and (claim[3], lengths[-1]) in found
    ]
    return markdown([*header, "why they differ"], lines) if rows else "Not measured yet."
