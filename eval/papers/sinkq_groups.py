"""SinkQ, Table 3: group sizes and residual lengths.

The text is read in calls of 35 tokens, whatever `--chunk` and `--steps` are. The calls then end at all positions of a
group, and each residual leaves other tokens packed. In calls that end with a group, all residuals of the group's size
would be equal.

Fails if, at some group size, a residual of 32 tokens does not lose less than none, or one of 128 not less than 32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

from papers.common import About, Claim, Row, Run, column, in_order, not_below, sources, text_rows

from qattn_hf.reading.texts import read_as

ABOUT = About(
    title="SinkQ, Table 3",
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tasks=("gsm8k", "gsm8k_cot"),
    missing="the paper measures GSM8K with 8 shots: name --tasks gsm8k,gsm8k_cot for other models. It chooses the pool "
    "once for a whole prompt (paper_sinkq:sink_prefill=whole); ours competes block by block.",
)
CHUNK = 35
RESIDUALS = (0, 8, 16, 32, 64, 128)
PAPER = {  # GSM8K, 8 shots; with chains of thought
    32: ((70.05, 73.16), (71.95, 74.22), (72.78, 74.83), (72.78, 74.53), (74.00, 76.88), (73.77, 77.33)),
    64: ((68.92, 72.63), (70.05, 73.01), (70.89, 73.84), (72.40, 75.06), (73.69, 76.42), (74.68, 76.42)),
    128: ((70.96, 73.54), (72.51, 74.15), (72.93, 74.37), (72.55, 75.06), (73.24, 75.36), (73.24, 76.65)),
}


def measure(run: Run) -> Iterator[Row]:
    ways, paper = {}, {}
    for group, figures in PAPER.items():
        for residual, (plain, cot) in zip(RESIDUALS, figures, strict=True):
            name = f"G {group}, R {residual}"
            ways[name] = f"sinkq:group_size={group},residual_length={residual}"
            paper[name] = {"gsm8k": plain, "gsm8k_cot": cot}
    reading = read_as(run.reading.ids, CHUNK, 0, run.reading.batch)
    return text_rows(dataclasses.replace(run, reading=reading), ways, paper)


def broken(rows: list[Row]) -> list[str]:
    orders = [
        (f"G {group}, R {more}", f"G {group}, R {less}") for group in PAPER for less, more in ((0, 32), (32, 128))
    ]
    return [
        wrong for s in sources(rows) if (l1 := column(rows, s, "attention_l1")) for wrong in not_below(l1, orders, s)
    ]


def pattern(rows: list[Row]) -> list[str]:
    """Where the smallest groups lose less than the largest whatever the residual."""
    small, large = min(PAPER), max(PAPER)
    found = []
    for source in sources(rows):
        kl = column(rows, source, "kl")
        pairs = [(kl.get(f"G {small}, R {r}"), kl.get(f"G {large}, R {r}")) for r in RESIDUALS]
        if all(less is not None and more is not None and less < more for less, more in pairs):
            each = ", ".join(
                f"{less:.4g} and {more:.4g} at R {r}" for r, (less, more) in zip(RESIDUALS, pairs, strict=True)
            )
            found.append(f"{source}, kl: G {small} is below G {large} at every residual: {each}")
    return found


CLAIMS = (
    Claim(
        "the longer the residual, the better, at every group size",
        in_order(
            "attention_l1",
            "kl",
            orders=[(f"G {g}, R {more}", f"G {g}, R {less}") for g in PAPER for less, more in pairwise(RESIDUALS)],
        ),
        "the residuals are so close that the text decides",
    ),
    Claim(
        "at one residual the group size shows no clear pattern",
        pattern,
        "the paper counts answers: GSM8K's 1,319 have a standard error of 1.2 points, and its group sizes differ by "
        "about as much",
    ),
)
