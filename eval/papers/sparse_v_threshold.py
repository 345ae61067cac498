"""Sparse V, sections 4.3, 4.5, 4.8, 7.1, 7.4 and 7.5: the cost of skipping small weights, by threshold and by format.

For the steps at the end of each row (`--steps`), rows have the share of values that were not read, and their weight.
Only these steps skip; by default they are one in twenty of the tokens in KL and perplexity. `budget` is our addition.
It bounds the mass that a row may drop.

Fails if skipping changes perplexity by more than 0.01 %, with the paper's 1e-6 in some format or with some threshold
from 1e-8 to 1e-4; or if the skipped share falls when the threshold grows, or is no larger at 1e-4 than at 1e-8. Kernels
skip whole tiles, the reference single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from papers.common import About, Row, Run, column, not_below, sources, text_rows

ABOUT = About(
    title="Sparse V, 4.3, 4.5, 4.8, 7.1, 7.4 and 7.5",
    model="Qwen/Qwen3-1.7B",
    tasks=("needle_single", "needle_multikey"),
    missing="the paper measures perplexity with Qwen3.5-35B-A3B and 27B on WikiText, in contexts of 512 to 32k. Its "
    "skip rates are for Qwen3-1.7B at 512, 2048 and 4096 tokens (--tokens), over all queries; ours are for decode "
    "steps, one in twenty of the tokens in perplexity. That turbo3 finds 9 of 9 needles with skipping and 7 without "
    "is not checked: the difference is two answers. Sections 4.2, 4.6, 4.7, 7.2 and 7.3 measure speed: `python "
    "eval/paper.py speed`.",
)
FORMATS = ("q8", "q4", "turbo3")
TAUS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
PAPER_PPL = 6.1756  # of turbo3 at each of these thresholds, 8 chunks
ON_OFF = {  # with and without, 1e-6
    "q8": {"ppl, 8 chunks": 6.1109, "needles of 9": 7},
    "q4": {"ppl, 50 chunks of 32k": 7.0857, "needles of 9": 8},
    "turbo3": {"ppl, 50 chunks of 32k": 7.1796},
}
NEEDLES = {"turbo3, off": 7, "turbo3, tau 1e-06": 9}
SKIPPED = {512: 9.1, 2048: 20.7, 4096: 28.4}  # tokens of context: per cent, Qwen3-1.7B
SAME = 1e-4  # of perplexity


def name(form: str, tau: float, budget: bool = False) -> str:
    return f"{form}, tau {tau:g}{', budget' if budget else ''}" if tau else f"{form}, off"


def measure(run: Run) -> Iterator[Row]:
    ways, paper = {}, {}
    tokens = run.reading.ids.shape[1]
    for form in FORMATS:
        for tau in (0, *TAUS) if form == "turbo3" else (0, 1e-6):
            asked = f"turboquant:k_format={form},v_format={form},sparse_v_tau={tau},sparse_v_budget=.inf"
            ways[name(form, tau)] = asked
            paper[name(form, tau)] = dict(ON_OFF[form]) if tau in (0, 1e-6) else {"ppl, 8 chunks": PAPER_PPL}
    for which, needles in NEEDLES.items():
        paper[which]["needles of 9"] = needles
    if tokens in SKIPPED:
        paper[name("turbo3", 1e-6)]["skipped, per cent"] = SKIPPED[tokens]
    ways[name("turbo3", 1e-4, True)] = "turboquant:k_format=turbo3,v_format=turbo3,sparse_v_tau=1e-4"
    return text_rows(run, ways, paper)


def broken(rows: list[Row]) -> list[str]:
    wrong = []
    for source in sources(rows):
        if not (ppl := column(rows, source, "ppl_change_pct")):
            continue
        skipped = column(rows, source, "skip_rate")
        for form in FORMATS:
            for tau in TAUS if form == "turbo3" else (1e-6,):
                if abs(ppl[name(form, tau)] - ppl[name(form, 0)]) > 100 * SAME:
                    wrong.append(f"{source}: {name(form, tau)} has another perplexity than {name(form, 0)}")
        for low, high in pairwise(TAUS):
            if skipped[name("turbo3", high)] < skipped[name("turbo3", low)]:
                wrong.append(f"{source}: less is skipped at {high:g} than at {low:g}")
        wrong += not_below(skipped, [(name("turbo3", TAUS[0]), name("turbo3", TAUS[-1]))], source)
    return wrong
