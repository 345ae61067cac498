"""Pass keys that a model finds in pruned prompts, with packed and unpacked caches: one JSON row each.

    python eval/record.py pruned-keys-smollm2 -- python eval/pruned_keys.py FOLDER --book TEXT

Prompts hide pass keys, as in `eval/released.py`, and are pruned as in `eval/pruning.py`. The question is the end of the
prompt, so the last queries know what is asked. The prompt's last token is read after the pruning. The answer is greedy.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pruning import METHODS, pruned, read
from released import Needle, beginning, encoder, needle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.model._compat import CACHE
from qattn_hf.model.loading import load, short_name


@torch.no_grad()
def answers(model: PreTrainedModel, cache: QAttnCache, token: int, key: list[int]) -> bool:
    """Whether the model writes `key` after `token`, through a cache of what precedes it."""
    for want in key:
        ids = torch.tensor([[token]], device=model.device)
        token = int(model(ids, use_cache=True, **{CACHE: cache}).logits[0, -1].argmax())
        if token != want:
            return False
    return True


def found_keys(model: PreTrainedModel, needles: list[Needle], shares: list[float]) -> Iterator[dict[str, Any]]:
    """How many pass keys a patched model finds, for each scorer and share."""
    right: Counter[tuple[str, float]] = Counter()
    for each in needles:
        cache, scores = read(model, torch.tensor([each.prompt[:-1]], device=model.device))
        for scorer, share, mine in pruned(cache, scores, shares):
            right[scorer, share] += answers(model, mine, each.prompt[-1], each.key)
    for (scorer, share), count in right.items():
        yield {"scorer": scorer, "share": share, "pass_keys": count, "asked": len(needles)}


def needles_of(tokenizer: PreTrainedTokenizerBase, book: Path, tokens: int, count: int) -> list[Needle]:
    """Make `count` prompts of `tokens` tokens that hide pass keys in a book."""
    encoded = encoder(tokenizer)
    text, generator = encoded(book.read_text(encoding="utf-8")), random.Random(5)
    return [needle(encoded, beginning(tokenizer), text, tokens, generator) for _ in range(count)]


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Pass keys found in pruned and packed prompts, as JSON rows.")
    made.add_argument("model", nargs="?", help="folder or hub name; default: the bundled model")
    made.add_argument("--book", type=Path, required=True, help="plain text in which pass keys are hidden")
    made.add_argument("--methods", default=METHODS)
    made.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25], help="of the prompt's tokens to keep")
    made.add_argument("--keys", type=int, default=32, help="pass keys to ask for")
    made.add_argument("--prompt", type=int, default=1900, help="tokens of a prompt")
    options = made.parse_args(arguments)
    name, model, tokenizer = load(options.model, dtype="float32" if not torch.cuda.is_available() else "bfloat16")
    needles = needles_of(tokenizer, options.book, options.prompt, options.keys)
    shape = {"bench": "pruned-keys", "model": short_name(name), "prompt": options.prompt}
    for method in options.methods.split(";"):
        patch(model, method)
        for row in found_keys(model, needles, options.shares):
            print(json.dumps({**shape, "method": method, **row}), flush=True)
        unpatch(model)


if __name__ == "__main__":
    main()
