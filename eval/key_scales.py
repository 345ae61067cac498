"""What scales of single keys gain KIVI's codes by channel, by fake quantization: `eval/key_scales.py DIR`.

    python eval/key_scales.py ../shared        # every model of DIR/models on DIR/data/books/heldout.txt

Keys alone are quantized, so that the differences are theirs. `none` is KIVI, `norm` divides each key by its norm
(`token_norm`), and `balance` is KVarN's: scales of channels and of tokens in turns, until the deviations of both are
even, of which KIVI's own scale and zero point then replace those of channels. A text is read in one pass: each query
sees the quantized keys of the groups that were packed when it came, and the others as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from qattn_hf.compare import rows_of
from qattn_hf.fidelity.metrics import divergence
from qattn_kernels.formats.kivi.reference import asymmetric, encode
from qattn_kernels.formats.kivi_norm.reference import norms

GROUP, RESIDUAL, TURNS = 128, 32, 6
KINDS = ("none", "norm", "balance")
BITS = (2, 3, 4)
NAME = "fake_kivi_keys"
chosen: tuple[str, int] | None = None  # kind and bits that attention takes; None is full precision


def balanced(x: torch.Tensor) -> torch.Tensor:
    """fp16 scales `[..., tokens]` of groups of keys `[..., tokens, D]`."""
    scale = torch.ones_like(x[..., 0])
    for _ in range(TURNS):
        columns = (x / scale[..., None]).square().mean(-2, keepdim=True).sqrt().clamp(min=1e-12)
        scale = (x / columns).square().mean(-1).sqrt()
    return scale.half()


def quantized(keys: torch.Tensor, kind: str, bits: int) -> torch.Tensor:
    """Keys `[B, H, T, D]` as they are read from codes; those of an unfinished group as they are."""
    whole = keys.shape[2] // GROUP * GROUP
    x = keys[:, :, :whole].unflatten(2, (-1, GROUP))
    scale = {"none": torch.ones_like, "norm": lambda _: norms(x), "balance": lambda _: balanced(x)}[kind](x[..., 0])
    unit = x / torch.where(scale == 0, 1.0, scale.float())[..., None]
    step, zero_point = (y[..., None, :] for y in asymmetric(unit.amin(-2), unit.amax(-2), bits))
    read = (encode(unit, step, zero_point, bits) * step.float() + zero_point.float()) * scale.float()[..., None]
    return torch.cat([read.flatten(2, 3), keys[:, :, whole:]], 2)


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of rows without padding."""
    group, place = query.shape[1] // key.shape[1], torch.arange(key.shape[2])
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ keys.mT
    if chosen is not None:
        read = quantized(key, *chosen).repeat_interleave(group, 1)
        packed = (place + 1 - RESIDUAL).clamp(min=0) // GROUP * GROUP
        scores = torch.where(place < packed[:, None], query @ read.mT, scores)
    scores = (scores * scaling).masked_fill(place > place[:, None], -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None


@torch.inference_mode()
def log_probabilities(model: Any, ids: torch.Tensor, kind: tuple[str, int] | None) -> list[torch.Tensor]:
    """Of each row, `[tokens, vocabulary]`, of the last two thirds of its tokens, in fp16."""
    global chosen
    chosen = kind
    return [model(row[None]).logits[0, len(row) // 3 :].log_softmax(-1).half() for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description="KL of KIVI's keys with scales of single keys.")
    parser.add_argument("folder", type=Path, help="with models/ and data/")
    parser.add_argument("--rows", type=int, default=4, help="rows of text")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row")
    options = parser.parse_args()
    AttentionInterface.register(NAME, attention)
    text = (options.folder / "data" / "books" / "heldout.txt").read_text(encoding="utf-8")
    for path in sorted(path for path in (options.folder / "models").iterdir() if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME).eval()
        ids = rows_of(AutoTokenizer.from_pretrained(path), text, options.rows, options.tokens)
        full = log_probabilities(model, ids, None)
        for kind, bits in ((kind, bits) for bits in BITS for kind in KINDS):
            read = log_probabilities(model, ids, (kind, bits))
            kl = torch.stack([divergence(p.float(), q.float()).mean() for p, q in zip(full, read, strict=True)])
            row = {"model": path.name, "bits": bits, "scale": kind, "kl": kl.mean(), "se": kl.std() / len(kl) ** 0.5}
            print(json.dumps({k: round(x.item(), 6) if torch.is_tensor(x) else x for k, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()
