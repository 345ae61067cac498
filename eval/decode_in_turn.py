"""Time decode steps of several methods in turn: `python eval/decode_in_turn.py` prints JSON rows by point and method.

    python eval/record.py speed-decode-in-turn -- python eval/decode_in_turn.py
    python eval/decode_in_turn.py --methods turbo:sink_num=0,turbo --points 16x512 --rounds 100    # a part of it

All methods of a point are captured first, as in `qattn bench decode`. Each round then replays every method once, in an
order that shifts by one, so that drift of the machine affects all methods alike. `ms` is the median step time. `ratio`
is the median of a round's time divided by the first method's time in that round. `_low` and `_high` mark quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from compare_trees import points_of

from qattn_hf.bench.decode import SETTLING, Point, packed_steps
from qattn_hf.bench.layers import Heads
from qattn_hf.bench.timing import milliseconds, release
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.recipes.spelling import split_method, split_methods

METHODS = "turbo:sink_num=0,turbo,int8"
POINTS = ",".join(f"{rows}x{tokens}" for rows in (1, 16, 64) for tokens in (512, 4096, 32768))


def spread(values: list[float], name: str) -> dict[str, float]:
    """Median and quartiles of `values` under `name`."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {key: round(x, 6) for key, x in ((name, middle), (f"{name}_low", low), (f"{name}_high", high))}


def in_turn(methods: list[str], point: Point, heads: Heads, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each method at a point: see above. Each replay puts the layers back first, which is not timed."""
    settings = [find_recipe(*_named(text)).settings for text in methods]
    ways = [packed_steps(point, each, heads, device) for each in settings]
    times: list[list[float]] = [[] for _ in ways]
    settling = SETTLING if device.type == "cuda" else 0
    for turn in range(settling + rounds):
        for place in range(len(ways)):
            i = (turn + place) % len(ways)
            ways[i].restore()
            taken = milliseconds(ways[i].replay, device) / ways[i].number
            if turn >= settling:
                times[i].append(taken)
    shape = {"bench": "decode-in-turn", **point._asdict(), **heads.row(), "device": device.type, "rounds": rounds}
    return [
        {**shape, "way": text, "impl": way.layers[0].spec.impl, **spread(mine, "ms")}
        | spread([ms / first for ms, first in zip(mine, times[0], strict=True)], "ratio")
        for text, way, mine in zip(methods, ways, times, strict=True)
    ]


def _named(text: str) -> tuple[str, None, dict[str, Any]]:
    method, settings = split_method(text)
    return method, None, settings


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode steps of several methods in turn.")
    parser.add_argument("--methods", default=METHODS, help="with settings, commas between; ratios are to the first")
    parser.add_argument("--points", type=points_of, default=points_of(POINTS), help="rows x tokens, as 1x512,64x512")
    parser.add_argument("--rounds", type=int, default=30, help="replays of each method at a point, 2 at least")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles need 2 at least")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = Heads() if device.type == "cuda" else Heads(4, 2, 32, torch.float32)
    for rows, tokens in options.points:
        for row in in_turn(split_methods([options.methods]), Point(rows, tokens), heads, options.rounds, device):
            print(json.dumps(row), flush=True)
        release(device)


if __name__ == "__main__":
    main()
