"""What a packed prefix costs to move: bytes a token, seconds to save, load and copy to another GPU.

    python eval/move_prefix.py eval/shapes/llama-3.1-8b.json --tokens 32768 --folder /dev/shm
    python eval/record.py move-prefix -- python eval/move_prefix.py ...

A model with random weights reads a prompt. Its cache is saved to a file in the folder, with digests, and loaded on the
same GPU, checked and unchecked. With a second GPU the tensors are also copied there. Times are medians of three. Each
setting prints one JSON row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.bench.model import model_of_config
from qattn_hf.model._compat import CACHE

TIMES = 3


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_of_config(options.shape, device, torch.bfloat16)
    ids = torch.randint(1, model.config.vocab_size, (1, options.tokens), device=device)
    for setting in options.method:
        patch(model, setting)
        with torch.inference_mode():
            cache = model(ids, use_cache=True, logits_to_keep=1)[CACHE]
        row = {"setting": setting, "tokens": options.tokens, **moved(model, cache, options.folder)}
        print(json.dumps(row), flush=True)
        unpatch(model)
        del cache
        torch.cuda.empty_cache()


def moved(model: Any, cache: QAttnCache, folder: str | None) -> dict[str, Any]:
    """The bytes of a cache as a file, and the seconds of each way to move it."""
    with tempfile.TemporaryDirectory(dir=folder) as where:
        path = Path(where) / "prefix.safetensors"
        save = seconds(lambda: cache.save(path))
        n_bytes = path.stat().st_size
        load = seconds(lambda: QAttnCache.load(path, model))
        unchecked = seconds(lambda: QAttnCache.load(path, model, verify=False))
    found = {"bytes": n_bytes, "bytes_per_token": round(n_bytes / int(cache.get_seq_length()), 1)}
    times = {"save": save, "load": load, "load_unchecked": unchecked}
    if torch.cuda.device_count() > 1:
        tensors = [layer.arena for layer in cache.packed if layer.arena is not None]
        times["gpu_to_gpu"] = seconds(lambda: [tensor.to("cuda:1") for tensor in tensors])
    for name, value in times.items():
        found |= {f"{name}_s": round(value, 4), f"{name}_gib_per_s": round(n_bytes / value / 2**30, 2)}
    return found


def seconds(run: Callable[[], Any]) -> float:
    """Median seconds of a call, with all GPUs idle before and after it."""
    times = []
    for _ in range(TIMES):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def synchronize() -> None:
    """Wait for all GPUs."""
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a packed prefix costs to move.")
    parser.add_argument("shape", help="config file of the model")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--method", action="append", default=[])
    parser.add_argument("--folder", help="where the file is written; the system's temporary folder by default")
    options = parser.parse_args(arguments)
    options.method = options.method or ["none", "int8", "turbo", "low2"]
    return options


if __name__ == "__main__":
    main()
