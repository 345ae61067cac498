"""What pruned prompts lose, with packed and unpacked caches: one JSON row each, for `eval/record.py`.

    python eval/record.py pruning-smollm2 -- python eval/pruning.py FOLDER --text WIKITEXT

Rows of the text are prompts. A prompt is read in one call, and `cache.keep` keeps a share of its tokens, chosen by
`examples/token_scores.py`. The text goes on through the pruned cache. Its logits are compared with the
unpatched model's, which sees the whole prompt. The scorer `all` keeps every token. `none` loses by pruning alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, patch, report, unpatch
from qattn_hf.model._compat import CACHE
from qattn_hf.model.loading import load, short_name
from qattn_hf.reading.metrics import divergence
from qattn_hf.reading.texts import made_text, rows_of
from qattn_kernels.layer.spec import SHORT_CALL

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from token_scores import Scores, best, key_norms, last_queries, observed_attention

METHODS = "none;turbo_rotated;turbo_rotated:bits=2;low2"
CHARACTERS = 8  # of a token of generated text, at most


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Log-probabilities `[B, T, vocabulary]` of tokens `[B, T]`, read in short calls as decode steps read them."""
    calls = (model(part, use_cache=True, **{CACHE: cache}).logits for part in ids.split(SHORT_CALL, 1))
    return torch.cat(list(calls), 1).float().log_softmax(-1)


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor) -> tuple[QAttnCache, dict[str, Scores]]:
    """Read a prompt. Returns the cache of a patched model, and the scores of each scorer."""
    cache = QAttnCache.for_model(model)
    with last_queries(model) as queries:
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return cache, {"norms": key_norms(cache), "attention": observed_attention(cache, queries)}


def pruned(
    cache: QAttnCache, scores: dict[str, Scores], shares: list[float]
) -> Iterator[tuple[str, float, QAttnCache]]:
    """Copies of a cache, with the scorer and the share of tokens that each keeps."""
    for scorer, share in [("all", 1.0), *((name, share) for name in scores for share in shares)]:
        mine = copy.deepcopy(cache)
        if share < 1:
            mine.keep(best(scores[scorer], share))
        yield scorer, share, mine


def figures(kl: list[torch.Tensor], same: list[torch.Tensor], held: list[int]) -> dict[str, Any]:
    """Mean KL to full precision with its standard error over rows, top-1 agreement, and bytes."""
    of_rows = torch.stack(kl).double()
    return {
        "kl": round(of_rows.mean().item(), 5),
        "kl_se": round((of_rows.std() / len(kl) ** 0.5).item(), 5),
        "same_top1": round(torch.stack(same).mean().item(), 4),
        "kv_bytes": round(sum(held) / len(held)),
    }


def measured(
    model: PreTrainedModel, ids: torch.Tensor, prompt: int, full: torch.Tensor, shares: list[float]
) -> Iterator[dict[str, Any]]:
    """Rows of a patched model, for each scorer and share."""
    found: dict[tuple[str, float], tuple[list, list, list]] = {}
    for row, want in zip(ids, full, strict=True):
        cache, scores = read(model, row[None, :prompt])
        for scorer, share, mine in pruned(cache, scores, shares):
            kl, same, held = found.setdefault((scorer, share), ([], [], []))
            held.append(report(mine).to_dict()["kv_bytes"])
            log_q = log_probabilities(model, row[None, prompt:], mine)[0]
            kl.append(divergence(want, log_q).mean())
            same.append((want.argmax(-1) == log_q.argmax(-1)).float().mean())
    for (scorer, share), columns in found.items():
        yield {"scorer": scorer, "share": share, **figures(*columns)}


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="KL of pruned and packed prompts, as JSON rows.")
    made.add_argument("model", nargs="?", help="folder or hub name; default: the bundled model")
    made.add_argument("--text", type=Path, help="a file of text; default: generated text")
    made.add_argument("--methods", default=METHODS)
    made.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25], help="of the prompt's tokens to keep")
    made.add_argument("--rows", type=int, default=8)
    made.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    made.add_argument("--after", type=int, default=128, help="tokens of the text after it, which are scored")
    options = made.parse_args(arguments)
    name, model, tokenizer = load(options.model, dtype="float32" if not torch.cuda.is_available() else "bfloat16")
    tokens = options.prompt + options.after
    text = options.text.read_text(encoding="utf-8") if options.text else made_text(CHARACTERS * options.rows * tokens)
    ids = rows_of(tokenizer, text, options.rows, tokens).to(model.device)
    with torch.no_grad():
        full = torch.stack([model(row[None]).logits[0, options.prompt :].float().log_softmax(-1) for row in ids])
    shape = {
        "bench": "pruning",
        "model": short_name(name),
        "prompt": options.prompt,
        "rows": options.rows,
        "after": options.after,
    }
    for method in options.methods.split(";"):
        patch(model, method)
        for row in measured(model, ids, options.prompt, full, options.shares):
            print(json.dumps({**shape, "method": method, **row}), flush=True)
        unpatch(model)


if __name__ == "__main__":
    main()
