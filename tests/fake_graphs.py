"""A stand-in for CUDA graphs, so that captured steps can be tested on a CPU."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import torch
from helpers import random_ids
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import LlamaForCausalLM, PreTrainedModel

from qattn_hf import report
from qattn_hf.model._compat import CACHE

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=12)
IDS = random_ids(2, 70)


class FakeGraphs:
    """In place of CUDA graphs: a capture runs Python code and no kernel, a replay the kernels and no Python code."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.capturing = False
        self.error: Exception | None = None

    def record(self, run: Any, device: torch.device, graphs: weakref.WeakSet[Any]) -> tuple[Any, Any]:
        cache = run.keywords[CACHE]
        state = [(tensor, tensor.clone()) for tensor, _ in cache.state_tensors().values()]
        if self.capturing:
            raise RuntimeError("a capture began inside of another")
        self.capturing = True
        try:
            out = run()
        finally:
            self.capturing = False
        for tensor, before in state:
            tensor.copy_(before)
        if self.error is not None:
            raise self.error
        self.captured += 1
        with torch.inference_mode(False):  # a replay writes its outputs in any mode
            kept = tree_map_only(torch.Tensor, lambda x: torch.full_like(x, -1), out)
        filled = [x for x in tree_leaves(kept) if isinstance(x, torch.Tensor)]
        # a graph keeps neither the cache nor its packed layers nor the model alive
        layers = [weakref.ref(x) if x in cache.packed else partial(copy.copy, x) for x in cache.layers]
        model = weakref.ref(run.func)
        shell = copy.copy(cache)
        shell.layers = []

        def replay() -> None:
            self.replayed += 1
            shell.layers = [layer() for layer in layers]
            counts = [layer._used for layer in shell.packed]
            out = model()(**{**inputs, CACHE: shell})
            for old, new in zip(filled, (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)), strict=True):
                old.copy_(new)
            for layer, count in zip(shell.packed, counts, strict=True):
                layer._used = count
            shell.layers = []

        inputs = {k: v for k, v in run.keywords.items() if v is not cache}
        graphs.add(replay)
        return replay, kept


def as_on_a_gpu(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """`generate` asks for the compiled call, as it does on a GPU."""
    model._valid_auto_compile_criteria = lambda kwargs, config: (
        kwargs[CACHE].is_compileable and not config.disable_compile
    )
    return model


def path(model: PreTrainedModel) -> tuple[str, str | None]:
    data = report(model).to_dict()
    return data["decode"], data["decode_reason"]
