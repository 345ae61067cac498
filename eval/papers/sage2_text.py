"""SageAttention2, Tables 1 and 10, the text models: attention in INT4 and INT8, smoothed or not, on a whole text.

Each row is read in one call, as for the paper's perplexities, with the arithmetic of `sage2.py`. Weights and values are
unquantized in Table 1 and E4M3 in Table 10, except for SageAttention. SageAttn-8b smooths queries, as the paper's
Algorithm 1 does for all bits (`sage2:smooth_q=tensor`). `method sage2` is our default, 8 bits without smoothed queries.

Fails if attention's error is not less with smoothing than without, with INT8 than with INT4, and with SageAttn-4b than
with either baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from papers.common import About, Row, Run, Way, column, not_below, row, sources, text_rows
from papers.sage2 import Setting, attend

from qattn_hf.attention.observe import Call
from qattn_hf.reading.texts import read_as

ABOUT = About(
    title="SageAttention2, Tables 1 and 10 (text)",
    model="meta-llama/Llama-3.1-8B",
    missing="perplexity of WikiText, LAMBADA, MMLU and LongBench need the paper's models; `qattn eval --method "
    "sage2:bits=4` runs the same tasks through the packed cache. Image and video models are left out. Our default "
    "differs from SageAttn-8b: it does not smooth 8-bit queries (row `method sage2`).",
)
NONE, SMOOTH, EIGHT, FOUR = "INT4, not smoothed", "INT4, smoothed", "SageAttn-8b", "SageAttn-4b"
HADAMARD, SMOOTH_ATTN, FIRST = "HadmdAttn", "SmoothAttn", "SageAttention"
SHIPPED = "method sage2"
SETTINGS = {
    NONE: Setting(smooth="none", pv="model"),
    SMOOTH: Setting(pv="model"),
    HADAMARD: Setting(smooth="hadamard"),
    SMOOTH_ATTN: Setting(smooth="smooth_attn"),
    FOUR: Setting(),
    EIGHT: Setting(bits=8),
    SHIPPED: Setting(bits=8, smooth="k"),
    FIRST: Setting(bits=8, smooth="k", granularity="block", pv="model"),
}
NAMES = ("wikitext ppl", "lambada", "mmlu", "longbench")
TABLE_1 = {"full": (6.013, 0.815), NONE: (11.698, 0.726), SMOOTH: (6.219, 0.808)}  # Llama3.1
TABLE_10: dict[str, dict[str, tuple[float | None, ...]]] = {
    "Llama3.1": {
        "full": (6.013, 0.815, 0.635, 49.40),
        HADAMARD: (7.872, 0.762, 0.500, 44.07),
        SMOOTH_ATTN: (7.180, 0.783, 0.541, 44.69),
        FOUR: (6.256, 0.798, 0.607, 48.79),
        EIGHT: (6.019, 0.811, 0.634, 49.59),
        FIRST: (6.017, 0.812, 0.634, 49.55),
    },
    "Llama2": {
        "full": (5.823, 0.886, 0.439, None),
        HADAMARD: (6.771, 0.860, 0.360, None),
        SMOOTH_ATTN: (6.717, 0.867, 0.392, None),
        FOUR: (5.912, 0.881, None, None),  # MMLU is not legible in the scan
        EIGHT: (5.828, 0.886, 0.438, None),
        FIRST: (5.824, 0.887, 0.439, None),
    },
    "GLM4": {
        "full": (7.241, 0.432, 0.743, 49.78),
        HADAMARD: (7.989, 0.435, 0.669, 45.97),
        SMOOTH_ATTN: (8.943, 0.449, 0.592, 42.20),
        FOUR: (7.352, 0.433, 0.725, 49.23),
        EIGHT: (7.242, 0.432, 0.745, 49.60),
        FIRST: (7.243, 0.433, 0.744, 49.79),
    },
}


@dataclass(frozen=True)
class Sage:
    """An attention over a whole text by one setting."""

    setting: Setting

    def __call__(self, call: Call) -> torch.Tensor:
        if call.scores.softcap or call.scores.sinks is not None or call.query.shape[2] != call.keys.shape[2]:
            raise ValueError("this attention knows no softcap and no learned sinks, and reads a text in one call")
        parts = (x.float().cpu() for x in (call.query, call.keys, call.values))
        rows = [attend(q, k, v, True, self.setting) for q, k, v in zip(*parts, strict=True)]
        return torch.stack(rows).transpose(1, 2).to(call.out)


def measure(run: Run) -> Iterator[Row]:
    beside = {
        name: dict(zip(NAMES, figures, strict=False)) for name, figures in (TABLE_1 | TABLE_10["Llama3.1"]).items()
    }
    for model, lines in TABLE_10.items():
        for name, figures in lines.items():
            yield row(f"paper, {model}", name, dict(zip(NAMES, figures, strict=True)), {})
    ids = run.reading.ids
    whole = dataclasses.replace(run, reading=read_as(ids, ids.shape[1], 0, run.reading.batch), tasks=[])
    ways: dict[str, Way] = {name: Sage(setting) for name, setting in SETTINGS.items()}
    yield from text_rows(whole, ways, beside)


def broken(rows: list[Row]) -> list[str]:
    orders = [(SMOOTH, NONE), (EIGHT, FOUR), (FOUR, HADAMARD), (FOUR, SMOOTH_ATTN)]
    return [
        wrong for s in sources(rows) if (l1 := column(rows, s, "attention_l1")) for wrong in not_below(l1, orders, s)
    ]
