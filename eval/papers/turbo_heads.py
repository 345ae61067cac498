"""TurboAttention, Fig. 7b: which heads get 2 bits, by criterion and by number of heads.

`2 by priority` ranks two heads of K and two of V separately when a row's first block closes. `4 of 16 by priority` is
the paper's way: it ranks heads of K and V together. Here it ranks them over everything that is read, or over a model's
first row, and names them in lists, because `turbo` has no joint ranking. Made layers have eight heads, and every second
head has outlier channels.

Fails if on made layers, with half of the heads at 2 bits, the paper's priority loses more than entropy or a fixed
shuffle, ranked either way, or if it loses less with more such heads. Its two factors, min-max and variation, are not
checked separately: on made layers they choose nearly the same heads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import papers.paper_turbo  # noqa: F401  registers the method
import torch
import yaml
from papers.common import (
    About,
    Claim,
    Layer,
    Row,
    Run,
    column,
    first_row,
    in_order,
    layer_error,
    not_below,
    row,
    text_rows,
)

from qattn_kernels.formats.flashq.reference import head_priority

ABOUT = About(
    title="TurboAttention, Fig. 7b",
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tasks=("aqua_cot",),
    missing="the figure is a plot of AQuA's accuracy and prints no numbers.",
)
MADE, HEADS, TOKENS, DIM = "made, eight heads", 8, 512, 64
RANKINGS = ("priority", "min_max", "variation", "entropy", "random")
COUNTS = (0, 2, 4, 6, 8)
JOINT = (4, 8, 12)  # none and all are the same as ranked apart
Lists = dict[str, list[list[int]]]  # 2-bit heads of each layer, as `turbo` takes them


def made() -> Layer:
    """Make a layer whose heads 1, 3, 5 and 7 have key and value channels up to six times larger than the others."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, generator=g) for _ in range(3))
    for x in (k, v):
        x[:, 1::2, :, :4] *= torch.tensor([3.0, 4.0, 5.0, 6.0])
    return q, k, v


def jointly(layers: list[Layer], ranking: str, n: int) -> Lists:
    """Return the `n` of the `2 H` heads of each layer that the ranking puts lowest. `layers`: as of `first_row`."""
    lists: Lists = {"k_low_heads": [], "v_low_heads": []}
    for _, k, v in layers:
        both = torch.cat([k, v])[None]
        keep, scale = torch.ones(1, *both.shape[1:3], dtype=torch.bool), torch.ones(1, both.shape[1])
        low = head_priority(both, scale, keep, ranking)[0].sort(stable=True).indices[:n].tolist()
        lists["k_low_heads"].append(sorted(head for head in low if head < len(k)))
        lists["v_low_heads"].append(sorted(head - len(k) for head in low if head >= len(k)))
    return lists


def measure(run: Run) -> Iterator[Row]:
    layer = q, k, v = made()
    for n in COUNTS:
        for ranking in RANKINGS:
            error = layer_error(f"paper_turbo:bits=mixed,sink_num=0,n_h={n},priority={ranking}", layer)
            yield row(MADE, f"{n} by {ranking}", {}, error)
    for n in JOINT:
        for ranking in RANKINGS:
            lists = jointly([(q[0], k[0], v[0])], ranking, n)
            yield row(
                MADE, f"{n} of {2 * HEADS} by {ranking}", {}, layer_error("turbo:bits=mixed,sink_num=0", layer, **lists)
            )
    heads, layers = run.model.config.num_key_value_heads, first_row(run)
    ways = {
        f"{heads // 2} by {ranking}": f"paper_turbo:bits=mixed,sink_num=0,priority={ranking}" for ranking in RANKINGS
    }
    with tempfile.TemporaryDirectory() as folder:
        for ranking in RANKINGS:
            recipe = Path(folder) / f"{ranking}.yaml"
            recipe.write_text(
                yaml.safe_dump({"method": "turbo", "bits": "mixed", "sink_num": 0, **jointly(layers, ranking, heads)})
            )
            ways[f"{heads} of {2 * heads} by {ranking}"] = str(recipe)
        yield from text_rows(run, ways, {})


def broken(rows: list[Row]) -> list[str]:
    half, error = HEADS // 2, column(rows, MADE, "relative_l1")
    apart, joint = (f"{half} by", f"{2 * half} of {2 * HEADS} by")
    orders = [(f"{how} priority", f"{how} {other}") for how in (apart, joint) for other in ("entropy", "random")]
    orders += [(f"{few} by priority", f"{many} by priority") for few, many in pairwise(COUNTS)]
    orders += [
        (f"{few} of {2 * HEADS} by priority", f"{many} of {2 * HEADS} by priority") for few, many in pairwise(JOINT)
    ]
    return not_below(error, orders, MADE)


SOME = [f"{n}" for n in range(1, 65)] + [f"{n} of {2 * n}" for n in range(1, 65)]  # KV heads of a layer, or half
CLAIMS = (
    Claim(
        "the priority loses less than every other ranking (Fig. 7b)",
        in_order(
            "attention_l1",
            "kl",
            orders=[(f"{some} by priority", f"{some} by {other}") for some in SOME for other in RANKINGS[1:]],
        ),
        "ranges measure how coarse a head's codes are, not how much the output depends on the head, which `qattn tune` "
        "measures. In a joint ranking keys have larger ranges, so nearly all values get 2 bits. Two or four KV heads "
        "leave few choices, and a fixed shuffle is one of them",
    ),
)
