"""SinkQ, Table 3: group sizes and residual lengths.

Fails if, at some group size, a residual of 128 tokens does not lose less than none. The paper sees no clear pattern in
the group size; nor is one asserted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from papers.common import About, Row, Run, column, not_below, sources, text_rows

ABOUT = About(
    title="SinkQ, Table 3",
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tasks=("gsm8k", "gsm8k_cot"),
    missing="the paper's accuracies are of GSM8K with 8 shots: name --tasks gsm8k,gsm8k_cot for other models. Its pool "
    "is chosen once for a whole prompt (sink_prefill=whole), ours competes block by block.",
)
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
    return text_rows(run, ways, paper)


def broken(rows: list[Row]) -> list[str]:
    orders = [(f"G {group}, R 128", f"G {group}, R 0") for group in PAPER]
    return [
        wrong for s in sources(rows) if (l1 := column(rows, s, "attention_l1")) for wrong in not_below(l1, orders, s)
    ]
