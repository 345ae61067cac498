"""SinkQ, Tables 7 and 8: token eviction at SinkQ's size, and ZipCache.

The first two thirds of each row are the prompt, and the rest is scored. Of the prompt, 16 % of the tokens stay, as in
the paper, or 20 % get 4 bits and the others 2. Fails if KL is not less with SinkQ than with each of the evictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from baselines.evict import Evict, ZipCache
from papers.common import About, Claim, Row, Run, Way, column, in_order, not_below, sources, text_rows
from papers.sinkq_accuracy import LONG, TASKS, WIDER

from qattn_hf.reading.texts import Reading

ABOUT = About(
    title="SinkQ, Tables 7 and 8",
    model="meta-llama/Llama-2-7b-chat-hf",
    missing="the paper scores LongBench, GSM8K, BBH and HumanEval with LLaMA-2-7B; the baselines here are references "
    "on one text. Table 8 repeats Table 7's averages, and its line for SinkQ differs from Table 1. Nothing is checked "
    "for ZipCache, because the paper does not give its settings.",
)
SINKQ, KIVI, EVICTIONS = "SinkQ", "KIVI", ("SnapKV", "H2O", "Streaming")
TABLE_7 = {
    KIVI: (20.43, 19.97, 19.82, 59.67, 85.16, 37.7, 58.73, 47.24, 43.59),
    "SnapKV": (18.96, 18.73, 19.64, 59, 84.84, 38.22, 60.5, 50.08, 43.75),
    "H2O": (17.51, 18.85, 19.88, 50, 84.22, 38.09, 58.23, 49.66, 42.05),
    "Streaming": (15.31, 19.39, 18.99, 51, 83.11, 36.8, 57.57, 47.33, 41.19),
    SINKQ: (19.95, 21.56, 20.81, 59.67, 85, 39.1, 59.44, 48.51, 44.26),
}
TABLE_8 = {
    KIVI: (16.3, 17.51, 21.61, 32.48, 34, 33.30, 9.75, 12.19, 43.59),
    SINKQ: (19.86, 19.33, 22.52, 33.33, 34.43, 33.74, 11.58, 14.63, 43.75),
    "ZipCache": (15.92, 17.74, 20.02, 32.85, 33.9, 32.35, 9.45, 15.24, 42.05),
}


def measure(run: Run) -> Iterator[Row]:
    ids = run.reading.ids
    tokens = ids.shape[1]
    prompt = 2 * tokens // 3
    reading = Reading(ids, [0, prompt, tokens], prompt, run.reading.batch)
    ways: dict[str, Way] = {
        "Streaming": Evict("streaming"),
        "H2O": Evict("h2o"),
        "SnapKV": Evict("snapkv"),
        "ZipCache": ZipCache(),
        KIVI: "kivi:bits=2,group_size=128,residual_length=128",
        SINKQ: "sinkq",
    }
    paper = {name: dict(zip(LONG, figures, strict=True)) for name, figures in TABLE_7.items()}
    for name, figures in TABLE_8.items():
        paper[name] = {**paper.get(name, {}), **dict(zip(TASKS, figures, strict=True))}
    yield from text_rows(dataclasses.replace(run, reading=reading, tasks=[]), ways, paper)


def broken(rows: list[Row]) -> list[str]:
    orders = [(SINKQ, other) for other in EVICTIONS]
    return [wrong for s in sources(rows) if (kl := column(rows, s, "kl")) for wrong in not_below(kl, orders, s)]


CLAIMS = (
    Claim("SinkQ is better than KIVI with a residual of 128 (Table 7)", in_order("kl", orders=[(SINKQ, KIVI)]), WIDER),
    Claim(
        "SinkQ is better than evictions (Table 7); it is by KL, but not by the error of attention alone",
        in_order("attention_l1", orders=[(SINKQ, other) for other in EVICTIONS]),
        "evicted tokens had little weight in attention, but the model needed some of them",
    ),
    Claim(
        "SnapKV is the best of the evictions (Table 7)",
        in_order("kl", orders=[("SnapKV", "H2O"), ("SnapKV", "Streaming")]),
        "the paper answers questions at the end of long texts; in running text the newest tokens, which `Streaming` "
        "keeps, matter most",
    ),
)
