"""List the kernels that a process would compile for each method: `python count_kernels.py METHOD...`.

Lines are `METHOD cold NAME`, or `METHOD warm NAME` for kernels that calls compile after `step.warm` has compiled its
list. `METHOD read NAME` is the same for rows that `qattn tune` reads, after `warm` for their calls. Methods do not
share compiled kernels here.

Nothing is compiled or run, and no GPU is needed: each of Triton's launches is followed up to the point where it would
compile a missing kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "eval"))

from compile_for import follow_launches  # first: it turns Triton's interpreter off

import torch  # isort: skip
from triton.runtime.jit import JITFunction

from qattn_hf.cli.tune import CHECK_ROWS, STEPS, TOKENS
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.warm import CALLS, Calls, LayerShape, variants

# rows and tokens of prompts, each followed by steps of one token
SHAPES = [(1, 100), (1, 700), (1, 3000), (1, 20000), (2, 700), (3, 300), (8, 700), (16, 512), (32, 1000), (50, 700)]
HEADS, KV_HEADS, HEAD_DIM, NEW_TOKENS = 32, 8, 128, 64
READ = read_as(torch.empty(CHECK_ROWS, TOKENS, dtype=torch.long), steps=STEPS, batch=CHECK_ROWS).calls()


def warm(spec: LayerSpec, calls: Calls) -> None:
    """Compile what `calls` launch."""
    shape = LayerShape(spec, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
    for one, _ in variants([shape], calls):
        one.kernel.warmup(*one.arguments, grid=one.grid, **one.options)


def main(*methods: str) -> None:
    torch.zeros = torch.empty  # no kernel runs, so nothing reads what caches hold
    for method in methods:
        name, settings = split_method(method)
        spec = replace(get_method(name)(**settings).last_layer_spec(KV_HEADS), impl="triton")
        for when, calls in {"cold": (), "warm": CALLS, "read": READ}.items():
            compiled: list[JITFunction] = []
            with follow_launches(lambda kernel, *_, compiled=compiled: compiled.append(kernel)):
                warm(spec, calls)
                known = len(compiled)
                read(spec) if when == "read" else serve(spec)
            for kernel in sorted(kernel.fn.__name__ for kernel in compiled[known:]):
                print(method, when, kernel)


def serve(spec: LayerSpec, dim: int = HEAD_DIM, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    """Launch what each of the shapes needs."""
    for batch, prompt in shapes:
        _call(QAttnLayer(spec, prompt + NEW_TOKENS), batch, dim, [(prompt, 1), (1, 1), (1, 1)])


def read(spec: LayerSpec) -> None:
    """Launch what rows need that are read in chunks and then token by token, with few earlier blocks and with many."""
    calls = [(tokens, past) for _, tokens, before in READ for past in ((1, 40) if before else (0,))]
    _call(QAttnLayer(spec, TOKENS), CHECK_ROWS, HEAD_DIM, calls)


def _call(layer: QAttnLayer, batch: int, dim: int, calls: Sequence[tuple[int, int]]) -> None:
    for tokens, past in calls:
        q, k, v = (
            torch.empty(batch, heads, tokens, dim, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        if not layer.is_initialized:
            layer.lazy_initialization(k, v)
        span = torch.tensor([[0, tokens]] * batch, dtype=torch.int32)
        fused_step(q, k, v, span, layer.state, layer.spec, Scores(dim**-0.5), past)


if __name__ == "__main__":
    main(*sys.argv[1:])
