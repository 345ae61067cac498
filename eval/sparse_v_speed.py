"""Sparse V with a real model's attention: decode time, share of skipped values and KL, by context and threshold.

    python eval/record.py speed-sparse-v -- python eval/sparse_v_speed.py MODEL TEXT --context 2048 --context 8192

Rows of a text are read through the packed cache, the last tokens one by one. KL compares these steps with the same
cache when every value is read. The timing covers the attention calls of the last step in all layers, with its queries,
keys and values, in one CUDA graph. `budget` is infinite, as in the paper, so that only thresholds decide.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import AutoTokenizer, PreTrainedModel

from qattn_hf import QAttnCache, patch, report, unpatch
from qattn_hf.bench.layers import bookkeeping
from qattn_hf.bench.model import load_model
from qattn_hf.bench.timing import capture, measure
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.reading.metrics import divergence
from qattn_hf.reading.texts import rows_of

METHODS = ("turbo", "turboquant:k_format=turbo4")
TAUS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)
STEPS, ROUNDS = 16, 4  # tokens read one by one; steps of each layer in the graph


class Attended(NamedTuple):
    """Arguments of one layer's attention in one step."""

    layer: QAttnLayer
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    span: torch.Tensor
    scores: Any

    def again(self) -> torch.Tensor:
        """Attend with the same numbers as one more token."""
        return self.layer.attend(self.query, self.layer.update(self.key, self.value)[0], self.span, self.scores)[0]


def main() -> None:
    made = argparse.ArgumentParser(description="Time sparse V on a model's own attention.")
    made.add_argument("model", help="folder of a trained model")
    made.add_argument("text", type=Path, help="text that it reads")
    made.add_argument("--context", type=int, action="append", help="tokens of a row; default: 2048")
    made.add_argument("--batch", type=int, default=16, help="rows")
    options = made.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(options.model, device)
    if device.type != "cuda":
        model = model.float()
    tokenizer, text = AutoTokenizer.from_pretrained(options.model), options.text.read_text(encoding="utf-8")
    for context in options.context or [2048]:
        ids = rows_of(tokenizer, text, options.batch, context).to(device)
        for method in METHODS:
            for row in measured(model, method, ids):
                print(json.dumps({"bench": "sparse v", "model": Path(options.model).name, **row}), flush=True)


def measured(model: PreTrainedModel, method: str, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    """A row for each threshold; the first, 0, reads every value."""
    dense = None
    for tau in TAUS:
        patch(model, f"{method},sparse_v_tau={tau},sparse_v_budget=.inf" if ":" in method else
              f"{method}:sparse_v_tau={tau},sparse_v_budget=.inf")  # fmt: skip
        log_p, step, cache = read(model, ids)
        said = report(cache).to_dict()
        dense = log_p if dense is None else dense
        restore = bookkeeping([one.layer for one in step])
        for one in step:
            one.again()  # compiles and loads what a capture needs
        restore()
        times = measure(capture([one.again for one in step] * ROUNDS, ids.device), ids.device, prepare=restore)
        unpatch(model)
        yield {
            "way": method,
            "tau": tau,
            "batch": ids.shape[0],
            "context": ids.shape[1],
            "ms": round(times.median / len(step) / ROUNDS, 6),
            "skip_rate": said["skip_rate"],
            "dropped_mass": said["dropped_mass"],
            "kl": float(divergence(dense, log_p).mean()),
            "impl": said["impl"],
        }


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[Attended], QAttnCache]:
    """Log-probabilities `[STEPS, B, V]` after tokens read one by one, the attention of the last one, and the cache."""
    cache, calls, attend = QAttnCache.for_model(model, max_cache_len=ids.shape[1] + 64), [], QAttnLayer.attend

    def watched(layer: QAttnLayer, query: Any, handle: Any, span: Any, scores: Any, unpadded: bool = False) -> Any:
        calls.append(Attended(layer, query.clone(), handle.key.clone(), handle.value.clone(), span.clone(), scores))
        return attend(layer, query, handle, span, scores, unpadded)

    model(ids[:, :-STEPS], past_key_values=cache, logits_to_keep=1)
    log_p = []
    with mock.patch.object(QAttnLayer, "attend", watched):
        for token in ids[:, -STEPS:].split(1, 1):
            calls.clear()
            log_p.append(model(token, past_key_values=cache).logits[:, 0].float().log_softmax(-1))
    return torch.stack(log_p), list(calls), cache


if __name__ == "__main__":
    main()
