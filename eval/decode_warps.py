"""Time one layer's decode step with other numbers of warps than `ops/decode/table.py` chooses.

    python eval/decode_warps.py --heads 64,8,128 --methods turbo,int8 --warps 1,2

Prints one JSON row for each method, number of warps and point (rows x cached tokens), and one for the best SDPA backend
in bf16. If a number of warps does not compile, its row has an `error` in place of `ms`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from qattn_hf.bench import decode, timing
from qattn_hf.bench.layers import Heads
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.recipes.spelling import split_method, split_methods
from qattn_kernels.launch import plan
from qattn_kernels.ops.decode import launch


def best_sdpa(point: decode.Point, heads: Heads, device: torch.device) -> dict[str, Any]:
    """The figures of the fastest backend."""
    found = []
    for name, backend in decode._backends(point, device).items():
        found.append(
            {"way": f"sdpa {name}", **timing.attempt(partial(decode._sdpa, point, backend, heads, device), ours=False)}
        )
        timing.release(device)
    return min(found, key=lambda row: row.get("ms", float("inf")))


def rows(
    heads: Heads, points: list[decode.Point], methods: list[str], warps: list[int], device: torch.device
) -> Iterator[dict[str, Any]]:
    chosen = launch.choose
    for point in points:
        shape = {"bench": "decode-warps", **point._asdict(), **heads.row()}
        yield {**shape, "warps": None, **best_sdpa(point, heads, device)}
        for text in methods:
            name, settings = split_method(text)
            method = find_recipe(name, None, settings).settings
            for count in warps:
                plan.forget_plans()  # which know the last number
                with patch.object(launch, "choose", lambda *sizes, n=count: chosen(*sizes)._replace(warps=n)):
                    figures = timing.attempt(partial(decode._packed, point, method, heads, device), ours=True)
                yield {**shape, "way": text, "warps": count, **figures}
                timing.release(device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a decode step with several numbers of warps.")
    parser.add_argument("--heads", default="64,8,128", help="query heads, KV heads, head dim")
    parser.add_argument("--methods", default="turbo,int8", help="with settings, commas between")
    parser.add_argument("--warps", default="1,2")
    parser.add_argument("--points", default="16x32768,16x4096,1x32768", help="rows x cached tokens")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    query, kv, dim = map(int, options.heads.split(","))
    heads = Heads(query, kv, dim, torch.bfloat16 if device.type == "cuda" else torch.float32)
    points = [decode.Point(*map(int, text.split("x"))) for text in options.points.split(",")]
    counts = [int(text) for text in options.warps.split(",")]
    for row in rows(heads, points, split_methods([options.methods]), counts, device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
