"""SinkQ, Table 4: the number of sinks, and first layers without sinks.

The rows are of the text, and of made layers with two sinks. Fails if one sink does not lose less than none on the made
layers; if the fourth to sixth sink gain as much there as the first three; or if, on a model with sinks, one sink does
not lose less than none, or six layers without a pool lose less than zero such layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from papers.common import (
    About,
    Row,
    Run,
    column,
    has_sinks,
    layer_error,
    made_layer,
    not_below,
    row,
    sources,
    text_rows,
)

ABOUT = About(
    title="SinkQ, Table 4",
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tasks=("gsm8k", "gsm8k_cot"),
    missing="the paper measures GSM8K with 8 shots: name --tasks gsm8k,gsm8k_cot for other models. Nothing is checked "
    "on a text if the model has no attention sinks.",
)
MADE = "made, two sinks"
NUMBER = (  # GSM8K, 8 shots; with chains of thought
    (62.09, 68.31),
    (71.80, 75.74),
    (71.57, 75.06),
    (72.55, 75.06),
    (72.25, 75.97),
    (72.18, 75.74),
    (72.18, 75.89),
)
SKIPPED = (
    (72.48, 75.59),
    (72.78, 75.44),
    (72.55, 75.06),
    (71.49, 74.68),
    (71.80, 73.64),
    (70.96, 74.53),
    (69.60, 74.00),
)
PAPER = {f"{n} sinks": {"gsm8k": plain, "gsm8k_cot": cot} for n, (plain, cot) in enumerate(NUMBER)}
SHALLOW = {f"none in {n} layers": {"gsm8k": plain, "gsm8k_cot": cot} for n, (plain, cot) in enumerate(SKIPPED)}


def measure(run: Run) -> Iterator[Row]:
    for n, name in enumerate(PAPER):
        yield row(MADE, name, PAPER[name], layer_error(f"sinkq:sink_num={n}", made_layer()))
    ways = {name: f"sinkq:sink_num={n}" for n, name in enumerate(PAPER)}
    ways |= {name: f"sinkq:sink_skip_layers={n}" for n, name in enumerate(SHALLOW)}
    there = has_sinks(run)
    for found in text_rows(run, ways, PAPER | SHALLOW):
        yield {**found, "has_sinks": there}


def broken(rows: list[Row]) -> list[str]:
    made = column(rows, MADE, "relative_l1")
    wrong = not_below(made, [("1 sinks", "0 sinks")], MADE)
    if not made["3 sinks"] - made["6 sinks"] < made["0 sinks"] - made["3 sinks"]:
        wrong.append(f"{MADE}: the fourth to sixth sink gain as much as the first three")
    for source in sources([r for r in rows if r.get("has_sinks")]):
        if l1 := column(rows, source, "attention_l1"):
            orders = [("1 sinks", "0 sinks"), ("none in 0 layers", "none in 6 layers")]
            wrong += not_below(l1, orders, source)
    return wrong
