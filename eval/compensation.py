"""What `compensate_k` leaves of the errors of scores: `eval/compensation.py MODEL...` prints one JSON row a case.

    python eval/compensation.py --data ../shared/data ../shared/models/tiny-llama-28m tiny-qwen2-14m

`left` is the mean square of the errors of scores, those of the queries and rotated keys of a held-out text, in groups
of `low2`, in 3 bits too, over what it is where each channel gets its code alone. Of each head the three smallest keys
are left out, as by a pool. The pass of random tokens that finds the queries' second moment has its tokens at positions
up to `positions`: a text whose queries stand behind these is turned by the rotary embedding as none of the pass was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf.compare import rows_of
from qattn_hf.fidelity.observe import Call, observed
from qattn_hf.model_constants import compensation
from qattn_hf.recipe import find_recipe
from qattn_kernels.formats.kivi.reference import asymmetric, encode, encode_compensated
from qattn_kernels.ops.rotate.reference import rotate

GROUP, SINKS, TOKENS = 128, 3, 4096
CLIPS = {2: 0.75, 3: 0.0}  # by bits: `low2`'s, and none of 3
QUERIES = {"first 2048": (0, 2048), "last 2048": (2048, 4096)}
POSITIONS = (2048, 4096, 8192, 32768)


def by_head(query: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotated queries `[Hkv, n, D]` that meet each KV head, of queries `[1, Hq, T, D]`."""
    return rotate(query)[0].float().unflatten(0, (heads, -1)).flatten(1, 2)


def left_of(keys: torch.Tensor, queries: torch.Tensor, shares: torch.Tensor, bits: int) -> float:
    """Mean square of the errors of scores with compensation, over that without.

    Args:
        keys: fp32 `[Hkv, T, D]`, as the model made them. queries: of `by_head`. shares: of `compensation.shares`.
    """
    kept = torch.ones(keys.shape[:2], dtype=torch.bool)
    kept.scatter_(1, keys.norm(dim=-1).topk(SINKS, largest=False).indices, False)
    x, kept = (y.unflatten(1, (-1, GROUP)).transpose(0, 1) for y in (rotate(keys), kept))
    low = torch.where(kept[..., None], x, torch.inf).amin(-2)
    high = torch.where(kept[..., None], x, -torch.inf).amax(-2)
    scale, zero = asymmetric(low, high, bits, CLIPS[bits])
    codes = (
        encode_compensated(x, scale, zero, bits, shares),
        encode(x, scale[..., None, :], zero[..., None, :], bits),
    )
    moment = queries.mT @ queries
    errors = [(code * scale.float()[..., None, :] + zero.float()[..., None, :] - x) * kept[..., None] for code in codes]
    ours, alone = (torch.einsum("nhtd,hde,nhte->", error, moment, error).item() for error in errors)
    return ours / alone


@torch.no_grad()
def rows_of_model(path: Path, text: str) -> list[dict[str, Any]]:
    """The means over layers of one model, a row for each case."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = rows_of(AutoTokenizer.from_pretrained(path), text, 1, TOKENS)
    calls: dict[int, Call] = {}
    with observed(model, lambda call: calls.update({call.layer: call})):
        model(ids, use_cache=False)
    specs: Any = find_recipe("low2", None, {}).layer_specs(model.config)
    rows = []
    for positions in POSITIONS:
        compensation.FARTHEST = model.config.max_position_embeddings = positions
        moments = compensation.second_moments(model, dict(enumerate(specs)), {})
        for bits in CLIPS:
            for name, (begin, end) in QUERIES.items():
                found = []
                for layer, call in calls.items():
                    keys = call.keys[0, :, :end].float()
                    queries = by_head(call.query[:, :, begin:end], len(keys))
                    found.append(left_of(keys, queries, compensation.shares(moments[layer]), bits))
                mean = round(sum(found) / len(found), 4)
                rows.append({"model": path.name, "bits": bits, "queries": name, "positions": positions, "left": mean})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of scores that compensation leaves, by where its pass looked.")
    parser.add_argument("models", type=Path, nargs="+", help="folders")
    parser.add_argument("--data", type=Path, required=True, help="folder with books/")
    options = parser.parse_args()
    text = (options.data / "books" / "heldout.txt").read_text(encoding="utf-8")
    for path in options.models:
        for row in rows_of_model(path, text):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
