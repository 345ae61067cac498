"""TurboAttention, Table 3: block sizes of queries and of keys and values.

Fails if some block size loses as much of attention as 2-bit codes do at 64: the paper calls the method robust to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from papers.common import About, Row, Run, column, not_below, sources, text_rows

ABOUT = About(
    title="TurboAttention, Table 3",
    model="microsoft/Phi-3-mini-4k-instruct",
    tasks=("gsm8k_cot",),
    missing="the paper's accuracies are of GSM8K with 8 shots; which version of Phi-3-mini is not said.",
)
PAPER = {
    (32, 32): 78.01,
    (32, 64): 78.01,
    (64, 32): 78.31,
    (64, 64): 78.31,
    (64, 128): 78.16,
    (128, 64): 78.01,
    (128, 128): 77.83,
}
TWO = "2 bits (64, 64)"


def measure(run: Run) -> Iterator[Row]:
    ways, paper = {}, {}
    for (q, kv), accuracy in PAPER.items():
        ways[f"({q}, {kv})"] = f"turbo:block_q={q},block_kv={kv},buffer_size={kv},softmax=sas,sink_num=0"
        paper[f"({q}, {kv})"] = {"gsm8k_cot": accuracy}
    return text_rows(run, ways | {TWO: "turbo:bits=2,softmax=sas,sink_num=0"}, paper)


def broken(rows: list[Row]) -> list[str]:
    orders = [(f"({q}, {kv})", TWO) for q, kv in PAPER]
    return [
        wrong for s in sources(rows) if (l1 := column(rows, s, "attention_l1")) for wrong in not_below(l1, orders, s)
    ]
