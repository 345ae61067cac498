"""TurboAttention, Tables 4 and 5: the separate costs of FlashQ and SAS, and the cost of SAS by threshold.

`SAS` is the approximate softmax over unquantized keys and values. Fails if attention's error is not less with SAS alone
than with FlashQ's 4 bits alone, as in Table 4; with both than with the two added up; and with SAS at the paper's
threshold of -6 than at -2.
"""

from __future__ import annotations

from collections.abc import Iterator

from papers.common import About, Row, Run, column, not_below, row, sources, text_rows

ABOUT = About(
    title="TurboAttention, Tables 4 and 5",
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tasks=("aqua_cot",),
    missing="Table 5 combines the method with quantized weights, LLM.int8() and Qserve, which are left out here. The "
    "paper does not say what PQ is. Accuracies need the paper's model.",
)
FLASHQ, SAS, BOTH = "FlashQ-4bit", "SAS", "FlashQ-4bit + SAS"
THRESHOLDS = (-2.0, -4.0, -8.0, -10.0)
TABLE_4 = {"FP16": 50.79, FLASHQ: 49.60, SAS: 50.12, BOTH: 48.03}
TABLE_5 = {
    "LLaMA3-8B-inst, gsm8k": {"FP16": 78.24, "LLM.int8()": 77.94, "LLM.int8() + TurboAttention": 77.48},
    "LLaMA2-7B, PQ": {"FP16": 79.05, "Qserve": 78.07, "Qserve + TurboAttention": 77.64},
}


def measure(run: Run) -> Iterator[Row]:
    for model, lines in TABLE_5.items():
        for name, figure in lines.items():
            yield row(f"paper, {model}", name, {"accuracy": figure}, {})
    ways: dict[str, str | None] = {f"SAS, threshold {t:g}": f"none:softmax=sas,sas_threshold={t}" for t in THRESHOLDS}
    ways |= {"FP16": None, SAS: "none:softmax=sas", FLASHQ: "turbo_paper", BOTH: "turbo_paper:softmax=sas"}
    yield from text_rows(run, ways, {name: {"aqua_cot": figure} for name, figure in TABLE_4.items()})


def broken(rows: list[Row]) -> list[str]:
    wrong = []
    for source in sources(rows):
        if l1 := column(rows, source, "attention_l1"):
            apart = f"{FLASHQ} and {SAS} apart"
            l1 = {**l1, apart: l1[FLASHQ] + l1[SAS]}
            wrong += not_below(l1, [(SAS, FLASHQ), (BOTH, apart), (SAS, "SAS, threshold -2")], source)
    return wrong
