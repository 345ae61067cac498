"""What a packed sliding window costs: `python eval/windows.py` prints one JSON row per measurement.

It uses a GPU if there is one, and measures three things:

- Steps of one layer after 32k tokens: with a window of 1,024, without a window over 1,024 tokens, and over all tokens.
- The time to move blocks to the front, and how many tokens pass between two moves.
- The bytes of a cache in Gemma 3's shape, layer by layer, with packed and unpacked windows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import Gemma3TextConfig

from qattn_hf.bench.layers import Heads, bookkeeping
from qattn_hf.bench.timing import capture, measure
from qattn_hf.check import check
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.window_layer import WindowLayer
from qattn_hf.model.layer_kinds import WindowLayerSpec
from qattn_hf.recipes.recipe import find_recipe
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported

HEADS = Heads(query=8, kv=4, dim=256)  # of Gemma 3 4B
STEPS = 16  # of one graph


def spec_of(method: str, heads: Heads, device: torch.device) -> LayerSpec:
    settings = find_recipe(method, None, {}).settings
    spec = settings.without_default_pool(settings.last_layer_spec(heads.kv))
    reason = no_triton(device.type) or unsupported(spec, heads.kv, heads.dim, heads.dim)
    return replace(spec, impl=settings.chosen_impl(device.type, reason))


def tokens_of(heads: Heads, batch: int, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Random queries `[B, Hq, T, D]`, keys and values `[B, Hkv, T, D]`."""
    return [
        torch.randn(batch, n, tokens, heads.dim, dtype=heads.dtype, device=device)
        for n in (heads.query, heads.kv, heads.kv)
    ]


def call(layer: QAttnLayer, qkv: list[torch.Tensor], span: torch.Tensor, window: int) -> torch.Tensor:
    q, k, v = qkv
    return layer.attend(q, layer.update(k, v)[0], span, Scores(q.shape[3] ** -0.5, window=window))[0]


@torch.no_grad()
def steps(method: str, heads: Heads, batch: int, context: int, window: int, device: torch.device) -> Iterator[Any]:
    """Rows of decode steps of the three layers, each fed its context in one call, and of one move to the front."""
    spec = spec_of(method, heads, device)
    windowed = WindowLayerSpec(**vars(spec), sliding_window=window)
    ways: list[tuple[str, QAttnLayer, int, int]] = [
        ("window", WindowLayer(windowed), context, window),
        ("the window's tokens", QAttnLayer(spec, window + 2 * STEPS), window, 0),
        ("all tokens, masked", QAttnLayer(spec, context + 2 * STEPS), context, window),
    ]
    new, one = tokens_of(heads, batch, 1, device), torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    for name, layer, held, seen in ways:
        layer.plan(held + 2 * STEPS)
        prompt = torch.tensor([[0, held]], dtype=torch.int32, device=device)
        call(layer, tokens_of(heads, batch, held, device), prompt, seen)
        layer.reserve(2 * STEPS)
        restore = bookkeeping([layer])
        step = partial(call, layer, new, one, seen)
        step()  # which compiles
        restore()
        times = measure(capture([step] * STEPS, device), device, prepare=restore)
        ms = times[0] / STEPS
        yield {"bench": "step", "way": name, "ms": round(ms, 6), "capacity": layer.capacity, "impl": spec.impl}
        if isinstance(layer, WindowLayer):
            moved = measure(layer._drop_front, device)
            spare = layer.capacity - layer._slots_used()
            yield {"bench": "move", "way": name, "ms": round(moved[0], 6), "every_tokens": spare}


def gemma3_bytes(method: str, context: int) -> Iterator[dict[str, Any]]:
    """Rows of the layers of a cache of one row in the shape of Gemma 3 4B, each setting of `sliding` in turn."""
    config = Gemma3TextConfig(num_hidden_layers=34, sliding_window=1024, dtype=torch.bfloat16)
    for sliding in ("exact", "packed"):
        found = check(config, method, settings={"sliding": sliding}, device_type="cpu", at_tokens=context)
        for row in found.layers:
            yield {"bench": "bytes", "sliding": sliding, "layer": row["layer"], "bytes": row["bytes"]}
        yield {"bench": "bytes", "sliding": sliding, "layer": "all", "bytes": found.kv_bytes}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed and bytes of packed sliding windows, as JSON rows.")
    parser.add_argument("--method", default="turbo")
    parser.add_argument("--batch", type=int, action="append", help="rows; 1 and 16 by default")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=HEADS.dim, help="head dim of the steps")
    options = parser.parse_args(arguments)
    device, heads = torch.device("cuda" if torch.cuda.is_available() else "cpu"), replace(HEADS, dim=options.dim)
    for batch in options.batch or [1, 16]:
        for row in steps(options.method, heads, batch, options.context, options.window, device):
            shape = {"method": options.method, "batch": batch, "context": options.context, "window": options.window}
            print(json.dumps({**shape, **heads.row(), "device": device.type, **row}), flush=True)
    for row in gemma3_bytes(options.method, options.context):
        print(json.dumps({"method": options.method, "context": options.context, **row}), flush=True)


if __name__ == "__main__":
    main()
