"""Sparse V, section 4.4 and the addendum: all pairs of key and value formats, by KL to full precision.

Fails if 2-bit keys with 8-bit values do not lose more KL than 2-bit values with 8-bit keys, the reason for asymmetric
formats; or if attention's error does not fall with the bits of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from papers.common import About, Claim, Row, Run, column, not_below, row, sources, text_rows

ABOUT = About(
    title="Sparse V, 4.4 and the addendum",
    model="Qwen/Qwen3-4B",
    tasks=("needle_single",),
    missing="the paper measures Qwen3.5-35B-A3B and 27B. Our turbo formats follow the released code, a codebook with "
    "one norm per block, instead of the text's polar angles.",
)
FORMATS = ("model", "q8", "turbo4", "q4", "turbo3", "turbo2")
FALLING = ("q8", "turbo4", "turbo3", "turbo2")
PAPER = {  # mean KL, RMS change of the right token's probability and same top-1 in per cent
    "MoE, Qwen3.5-35B-A3B": {
        "q8": (0.001549, 1.23, 98.43),
        "q4": (0.008091, 2.75, 95.83),
        "turbo3": (0.016145, 4.09, 94.31),
    },
    "dense, Qwen3.5-27B": {
        "q8": (0.000018, 0.13, 99.90),
        "q4": (0.002741, 1.44, 97.65),
        "turbo3": (0.009900, 2.74, 95.98),
    },
}
ADDENDUM: dict[str, dict[str, object]] = {  # what others found; K/V
    "model/turbo2": {"cosine": 1.0, "same top-1, per cent": 100, "who": "Qwen3-4B, 8k"},
    "q8/turbo4": {"who": "lossless on four architectures"},
}


def measure(run: Run) -> Iterator[Row]:
    beside: dict[str, dict[str, object]] = {pair: dict(figures) for pair, figures in ADDENDUM.items()}
    for model, lines in PAPER.items():
        for form, figures in lines.items():
            found = dict(zip(("kl", "rms_change, per cent", "same_top1, per cent"), figures, strict=True))
            beside.setdefault(f"{form}/{form}", dict(found))
            yield row(f"paper, {model}", f"{form}/{form}", found, {})
    ways = {
        f"{k}/{v}": f"turboquant:k_format={k},v_format={v}"
        for k in FORMATS
        for v in FORMATS
        if (k, v) != ("model",) * 2
    }
    yield from text_rows(run, ways, beside)


def broken(rows: list[Row]) -> list[str]:
    wrong = []
    for source in sources(rows):
        if kl := column(rows, source, "kl"):
            wrong += not_below(kl, [("q8/turbo2", "turbo2/q8")], source)
            falling = [f"{form}/{form}" for form in FALLING if form in FORMATS]
            wrong += not_below(column(rows, source, "attention_l1"), list(pairwise(falling)), source)
    return wrong


def changed(rows: list[Row]) -> list[str]:
    """Return the rows where 2-bit values with unquantized keys change an answer."""
    free = "model/turbo2"
    return [
        f"{source}: {free} has a same top-1 of {same[free]:.4g} and a KL of {column(rows, source, 'kl')[free]:.4g}"
        for source in sources(rows)
        if (same := column(rows, source, "same_top1")).get(free, 1) < 1
    ]


CLAIMS = (
    Claim(
        "two-bit values are free while keys keep their precision, 100 % same top-1 (addendum)",
        changed,
        "what the addendum measures are attention scores, which values do not enter",
    ),
)
