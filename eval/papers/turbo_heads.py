"""TurboAttention, Fig. 7b: which heads get 2 bits, by what ranks them and by how many they are.

Made layers have eight heads, and in every second some channels stand out. Fails if, with half of these heads at 2
bits, the paper's priority loses more than entropy or a fixed shuffle, or if it loses less with more such heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from papers.common import About, Layer, Row, Run, column, layer_error, not_below, row, text_rows

ABOUT = About(
    title="TurboAttention, Fig. 7b",
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tasks=("aqua_cot",),
    missing="the figure is a plot of AQuA's accuracy and prints no numbers. It ranks 16 heads of K and V together; "
    "here n of either are ranked apart. Of min-max and variation, the two factors of the priority, nothing is "
    "asserted.",
)
MADE, HEADS, TOKENS, DIM = "made, eight heads", 8, 512, 64
RANKINGS = ("priority", "min_max", "variation", "entropy", "random")
COUNTS = (0, 2, 4, 6, 8)


def made() -> Layer:
    """Keys, and values, of heads 1, 3, 5, 7 have channels that are up to six times as large as the others."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, generator=g) for _ in range(3))
    for x in (k, v):
        x[:, 1::2, :, :4] *= torch.tensor([3.0, 4.0, 5.0, 6.0])
    return q, k, v


def measure(run: Run) -> Iterator[Row]:
    layer = made()
    for n in COUNTS:
        for ranking in RANKINGS:
            error = layer_error(f"turbo:bits=mixed,n_h={n},priority={ranking}", layer)
            yield row(MADE, f"{n} by {ranking}", {}, error)
    heads = run.model.config.num_key_value_heads
    ways = {f"{heads // 2} by {ranking}": f"turbo:bits=mixed,priority={ranking}" for ranking in RANKINGS}
    yield from text_rows(run, ways, {})


def broken(rows: list[Row]) -> list[str]:
    half, error = HEADS // 2, column(rows, MADE, "relative_l1")
    orders = [(f"{half} by priority", f"{half} by {other}") for other in ("entropy", "random")]
    orders += [(f"{few} by priority", f"{many} by priority") for few, many in pairwise(COUNTS)]
    return not_below(error, orders, MADE)
