"""Measure waiting for the compiler: one process meets ten shapes, with an empty kernel cache and then a filled one.

Each process patches a model of two layers and generates at once, so nothing is compiled ahead. The wait for a shape is
the extra time of its first `generate` over its second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.bench.model import LLAMA_8B, TINY, random_model
from qattn_hf.bench.timing import synchronize
from qattn_hf.patching.patcher import patch

# rows and tokens of prompts; prompts of two rows have padding
SHAPES = [(1, 100), (1, 700), (1, 3000), (1, 20000), (2, 700), (3, 300), (8, 700), (16, 512), (32, 1000), (50, 700)]
FEW = [(1, 40), (2, 50)]
NEW_TOKENS = 8


def rows(methods: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure each method in two processes, and yield a row for each process.

    Args:
        methods: as `patch` takes them, such as `turbo:bits=2`.
        device: device that the processes run on.

    Yields:
        `way`, `cache` (`cold` or `warm`), number of compiled `kernels`, `wait_s` in total, and `waits_s` of each shape.

    Raises:
        RuntimeError: a process failed.
    """
    for way in methods:
        with tempfile.TemporaryDirectory() as folder:
            known = 0
            for cache in ("cold", "warm"):
                found = subprocess.run(
                    [sys.executable, "-m", "qattn_hf.bench.first_call", way, str(device)],
                    env={**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                if found.returncode:
                    raise RuntimeError(f"the process that measures {way} failed with {found.returncode}")
                kernels = len(list(Path(folder).rglob("*.cubin")))
                figures = json.loads(found.stdout.splitlines()[-1])
                compiled = {"packed": True, "cache": cache, "kernels": kernels - known}
                yield {"bench": "first-call", "way": way, **compiled, **figures}
                known = kernels


def _generated(model: PreTrainedModel, batch: int, tokens: int) -> float:
    """Return the seconds of one `generate`."""
    ids = torch.randint(1, model.config.vocab_size, (batch, tokens), device=model.device)
    mask = torch.ones_like(ids)
    mask[0, : tokens // 10] = batch != 2  # left padding
    synchronize(model.device)
    began = time.perf_counter()
    model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    synchronize(model.device)
    return time.perf_counter() - began


def main(method: str, where: str) -> None:
    """Print the waits of a process that patches a model and generates."""
    device = torch.device(where)
    fast = device.type == "cuda"
    sizes = {**LLAMA_8B, "num_hidden_layers": 2} if fast else TINY
    model = random_model(sizes, device, torch.bfloat16 if fast else torch.float32)
    _generated(model, 1, 40)  # loads what PyTorch itself needs
    patch(model, method)
    waits = []
    for shape in SHAPES if fast else FEW:
        first, second = _generated(model, *shape), _generated(model, *shape)
        waits.append(round(first - second, 3))
    print(json.dumps({"wait_s": round(sum(waits), 3), "waits_s": waits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
