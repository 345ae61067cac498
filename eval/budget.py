"""A cache with `memory=`: its cost compared with fixed bits, and a generation that outgrows its memory.

    python eval/budget.py quality ../shared/models/NAME --text ../shared/data/books/heldout.txt
    python eval/budget.py generate                # on a GPU; --quick: a small model on any device, without fixed bits

`quality` measures the KL to full precision, in nats per token, of text rows read in chunks through a cache. It measures
fixed settings first. Then it gives a cache that begins with 8 bits the final bytes of each of these, and some sizes in
between, as `memory`. `kl_end` is the KL over the last quarter of each row, when the memory is full.

`generate` writes greedy tokens with random weights in the shape of Llama-3.2-1B, 16 times the prompt's length, until
the tokens would need more than four times the memory in bf16. It prints bytes, bits and speed on the way, and each
pause.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qattn_hf import patch, report
from qattn_hf.bench.model import TINY, random_model
from qattn_hf.fidelity.compare import through
from qattn_hf.reading.texts import Reading, full_logits, read_as, rows_of
from qattn_hf.recipes.recipe import find_recipe

ROWS, TOKENS, CHUNK = 8, 2048, 64
PIECES = {"": "sink_num=0,", "rotated": "rotate_k=hadamard,v_scale=token,sink_num=0,"}
FIXED = ("bits=4", "k_bits=4,v_bits=2", "bits=2")
PLENTY = "1024GiB"
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


def measured(model: PreTrainedModel, setting: str, reading: Reading, full: list[list[torch.Tensor]]) -> dict[str, Any]:
    """KL over all scored tokens and over the last quarter of rows, and the cache's bytes and bits in the end."""
    parts = []
    for ids, logits in zip(reading.groups(), full, strict=True):
        tokens, cache = through(model, find_recipe(f"turbo:{setting}", None, {}), setting, ids, reading, logits)
        parts.append(tokens["kl"])
    kl, data = torch.cat(parts).double(), report(cache).to_dict()
    return {
        "kl": kl.mean().item(),
        "kl_end": kl[:, -reading.ids.shape[1] // 4 :].mean().item(),
        "kv_bytes": sum(
            arena.nbytes for layer in cache.packed if (arena := layer.arena) is not None
        ),  # as `memory` counts them
        "effective_bits": data["effective_bits"],
        "tokens_by_bits": data["layers"][0]["tokens_by_bits"],
    }


def quality(options: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, text = AutoTokenizer.from_pretrained(options.model), options.text.read_text(encoding="utf-8")
    reading = read_as(rows_of(tokenizer, text, options.rows, options.tokens), CHUNK, batch=options.rows)
    layers = model.config.num_hidden_layers
    with torch.inference_mode():
        full = [full_logits(model, ids, reading) for ids in reading.groups()]
        for pieces, begins in PIECES.items():

            def row(name: str, setting: str, begins: str = begins, pieces: str = pieces) -> int:
                found = measured(model, begins + setting, reading, full)
                about = {"pieces": pieces, "name": name, "setting": setting, "tokens": options.tokens}
                print(json.dumps({**about, "rows": options.rows, **found}), flush=True)
                return found["kv_bytes"]

            sizes = [row(name, name) for name in FIXED]
            sizes = [row("bits=8", f"bits=2,memory={PLENTY}"), *sizes]
            rooms = {f"room of {name}": n for name, n in zip(FIXED, sizes[1:], strict=True)}
            rooms["halfway from 8 to 4 bits"] = sum(sizes[:2]) // 2
            rooms["halfway from 4 to 2 bits"] = (sizes[1] + sizes[3]) // 2
            for name, n_bytes in rooms.items():
                row(name, f"bits=2,memory={n_bytes * (layers + 1) // layers + layers}")


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
            patch(model, f"turbo:{PIECES['rotated']}{setting}")
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
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("quality")
    one.add_argument("model", help="folder of a model, or its name")
    one.add_argument("--text", type=Path, required=True)
    one.add_argument("--rows", type=int, default=ROWS)
    one.add_argument("--tokens", type=int, default=TOKENS)
    one.set_defaults(run=quality)
    other = commands.add_parser("generate")
    other.add_argument("--tokens", type=int, default=17 * 1024)
    other.add_argument("--quick", action="store_true")
    other.set_defaults(run=generate)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
