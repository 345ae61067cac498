"""A cache with `memory=`: a generation that outgrows its memory, compared with fixed bits.

    python eval/budget.py           # on a GPU
    python eval/budget.py --quick   # a small model on any device, without fixed bits

The model has random weights in the shape of Llama-3.2-1B. It writes greedy tokens, 16 times the prompt's length, until
the tokens would need more than four times the memory in bf16. The script prints bytes, bits and speed on the way, and
each pause.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf import patch, report
from qattn_hf.bench.model import TINY, random_model

SETTINGS = "rotate_k=hadamard,v_scale=token,sink_num=0"
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
OUTGROWN = 4.25  # times the memory limit that unquantized tokens would take


class Watch:
    """Streamer that notes when tokens come, and what the cache holds from time to time."""

    def __init__(self, model: PreTrainedModel, every: int):
        self.model, self.every, self.times, self.moves = model, every, [time.perf_counter()], 0
        self.changes: list[dict[str, Any]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        count, patched = len(self.times) - 2, self.model._qattn
        if not count:  # the prompt, before its call
            return
        cache: Any = patched.last.cache
        moves = cache.layers[0].moves
        if moves != self.moves or count % self.every == 0:
            self.moves = moves
            k, v = (spans(cache.layers[0], side) for side in "kv")
            held = sum(layer.arena.nbytes for layer in cache.layers if layer.arena is not None)
            self.changes.append({"tokens": count, "kv_bytes": held, "k": k, "v": v})

    def end(self) -> None:
        pass


def spans(layer: Any, side: str) -> list[tuple[int, int]]:
    """Return each bit width of a side with its number of blocks, including spare capacity."""
    return [(bits, end - first) for bits, first, end in getattr(layer.spec, side).spans(layer.blocks)]


def generate(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not options.quick else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(TINY if options.quick else LLAMA_1B, device, dtype)
    config, tokens = model.config, 800 if options.quick else options.tokens
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    memory = int(tokens * token_bytes / OUTGROWN)
    prompt = torch.randint(1, config.vocab_size, (1, tokens // 17), device=device)
    room = f"bits=2,memory={memory}"
    fixed = {} if options.quick else {"bits=4": "bits=4", "bits=2": "bits=2"}
    for name, setting in {"memory": room, **fixed}.items():
        for run in ("cold", "warm") if name == "memory" and not options.quick else ("warm",):
            patch(model, f"turbo:{SETTINGS},{setting}")
            watch = Watch(model, max(1, tokens // 32))
            out = model.generate(prompt, max_new_tokens=tokens - prompt.shape[1], do_sample=False, streamer=watch)
            data = report(model).to_dict()
            steps = torch.tensor(watch.times[2:]).diff()
            row = {
                "setting": name,
                "run": run,
                "memory": memory if name == "memory" else None,
                "tokens": out.shape[1],
                "prompt": prompt.shape[1],
                "bf16_bytes": out.shape[1] * token_bytes,
                "kv_bytes": data["kv_bytes"],
                "most_bytes": max(change["kv_bytes"] for change in watch.changes),
                "effective_bits": data["effective_bits"],
                "tokens_by_bits": data["layers"][0]["tokens_by_bits"],
                "decode": data["decode"],
                "seconds": watch.times[-1] - watch.times[1],
                "ms_a_token": 1e3 * steps.median().item(),
                "pauses_ms": sorted((round(1e3 * x, 1) for x in steps.tolist()), reverse=True)[:40],
                "changes": watch.changes,
            }
            print(json.dumps(row), flush=True)
            model._qattn.release()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=17 * 1024)
    parser.add_argument("--quick", action="store_true")
    generate(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
