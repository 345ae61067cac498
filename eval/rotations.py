"""What rotations from data gain keys and values in 2 to 4 bits, by fake quantization: `eval/rotations.py DIR`.

    python eval/rotations.py ../shared         # fitted on DIR/data/books/train.txt.xz, judged on heldout.txt

One matrix a layer and KV head, fitted after RoPE. Codes are of `x A`; what is read is `x A` from codes, times the
inverse of `A`. `H` is the block Hadamard of `rotate_k: hadamard`:

    none      no rotation
    hadamard  H
    query     eigenvectors of the second moment of queries, of values those of attention's outputs, then H: OSCAR's
              rotation (Zhou et al., arXiv 2605.17757) without its clipping
    key       eigenvectors of the covariance of what is stored, alone
    scale     a number a channel, which balances what noise there costs and what is stored there, then H
    balance   a full matrix that does (no rotation: lengths change), then H

Noise of keys costs what queries multiply it by, noise of values what `o_proj` does. Keys or values alone are quantized
(`side`), in one of these stores: KIVI's groups of 128 tokens by channel, the same of keys over their norms
(`token_norm`), FlashQ's blocks of 64, or by token. A text is read in one pass as in `eval/key_scales.py`.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from qattn_hf.compare import rows_of
from qattn_hf.fidelity.metrics import divergence
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.formats.flashq.reference import stage_one, stage_two
from qattn_kernels.formats.kivi.reference import asymmetric, encode
from qattn_kernels.formats.kivi_norm.reference import norms
from qattn_kernels.ops.rotate.reference import rotate

GROUP, BLOCK, RESIDUAL = 128, 64, 32
FITTED = (30, 1024)  # rows and tokens that moments are of
LEAST = 1e-3  # of a moment's mean eigenvalue, added to all: a direction that the text lacks costs something too
BITS = (2, 3, 4)
KINDS = {"K": ("none", "hadamard", "query", "key", "scale", "balance"), "V": ("none", "hadamard", "query", "balance")}
STORES = {"K": ("kivi", "kivi_norm", "flashq", "token"), "V": ("flashq", "token")}
NAME = "fake_rotated"
moments: dict[tuple[int, str], torch.Tensor] | None = None  # while a text is fitted, fp64 `[KV heads, D, D]`
chosen: tuple[str, str, int, list[torch.Tensor]] | None = None  # side, store, bits, a matrix of each layer


def whole(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest numbers `[..., D]` of groups `[..., tokens, D]`: what their codes reach from and to."""
    return x.amin(-2), x.amax(-2)


Reach = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
reach: Reach = whole  # `eval/clipping.py` takes others


def by_range(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """`x` as it is read from codes whose step and zero point are of the range along `dim`."""
    if dim == -1:
        return by_range(x.mT, -2, bits).mT
    return by_reach(x, *reach(x, bits), bits)


def by_reach(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` `[..., tokens, D]` as it is read from codes that reach from `low` to `high` `[..., D]`."""
    step, zero_point = (y[..., None, :] for y in asymmetric(low, high, bits))
    return encode(x, step, zero_point, bits) * step.float() + zero_point.float()


def quantized(x: torch.Tensor, store: str, bits: int) -> torch.Tensor:
    """Whole groups `[B, H, groups, 128, D]` as they are read from codes."""
    if store == "flashq":
        blocks = x.unflatten(3, (-1, BLOCK))
        x1, scale = stage_one(int8_tokens(blocks))
        code, step, zero_point = stage_two(x1, torch.ones_like(x1[..., 0], dtype=torch.bool), bits)
        read = code.float() * step.float()[..., None, :] + zero_point.float()[..., None, :]
        return (read * scale[..., None, None]).flatten(3, 4)
    if store == "kivi_norm":
        scale = norms(x).float()[..., None]
        return quantized(x / torch.where(scale == 0, 1.0, scale), "kivi", bits) * scale
    return by_range(x, -2 if store == "kivi" else -1, bits)


def read(x: torch.Tensor, layer: int) -> torch.Tensor:
    """`[B, H, T, D]` as it is read back; tokens of an unfinished group as they are."""
    assert chosen is not None
    _, store, bits, matrices = chosen
    matrix, whole = matrices[layer], x.shape[2] // GROUP * GROUP
    groups = (x[:, :, :whole] @ matrix).unflatten(2, (-1, GROUP))
    back = quantized(groups, store, bits).flatten(2, 3) @ torch.linalg.inv(matrix)
    return torch.cat([back, x[:, :, whole:]], 2)


def add_moments(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """Of one row; queries and outputs of the heads that share keys are summed. `spread` is around means of groups."""
    assert moments is not None
    heads = key.shape[1]
    for name, x in (("query", query), ("K", key), ("V", value), ("output", out)):
        x = x[0].double().unflatten(0, (heads, -1))
        parts = {name: x}
        if name in "KV":
            parts[f"{name} spread"] = (y := x.unflatten(2, (-1, GROUP))) - y.mean(3, keepdim=True)
        for part, y in parts.items():
            y = y.reshape(heads, -1, y.shape[-1])
            moments[layer, part] = moments.get((layer, part), 0) + y.mT @ y / y.shape[1]


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of one row without padding."""
    group, place = query.shape[1] // key.shape[1], torch.arange(key.shape[2])
    closed = place < ((place + 1 - RESIDUAL).clamp(min=0) // GROUP * GROUP)[:, None]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ keys.mT
    if chosen is not None and chosen[0] == "K":
        scores = torch.where(closed, query @ read(key, module.layer_idx).repeat_interleave(group, 1).mT, scores)
    weights = (scores * scaling).masked_fill(place > place[:, None], -torch.inf).softmax(-1)
    out = weights @ values
    if chosen is not None and chosen[0] == "V":
        out += (weights * closed) @ (read(value, module.layer_idx) - value).repeat_interleave(group, 1)
    if moments is not None:
        add_moments(module.layer_idx, query, key, value, out)
    return out.transpose(1, 2).contiguous(), None


def fit(model: Any, ids: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """Moments of each layer by name, with those of `o_proj`: what noise of each direction of a head's output costs."""
    global moments
    found = moments = {}
    for row in ids:
        model(row[None])
    moments = None
    for n, layer in enumerate(model.model.layers):
        weight = layer.self_attn.o_proj.weight.double()
        heads, dim = found[n, "K"].shape[:2]
        by_head = weight.mT.reshape(heads, -1, dim, weight.shape[0])  # [KV heads, heads that share, D, hidden]
        found[n, "o_proj"] = (by_head @ by_head.mT).sum(1)
    return found


def balanced(cost: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """`A` `[..., D, D]` with `A' stored A` and `inv(A) cost inv(A)'` the same diagonal matrix."""
    value, vector = torch.linalg.eigh(cost)
    root = vector @ (value.sqrt()[..., None] * vector.mT)
    both, axes = torch.linalg.eigh(root @ stored @ root)
    return root @ axes * both.pow(-0.25)[..., None, :]


def matrix(found: dict[tuple[int, str], torch.Tensor], layer: int, side: str, store: str, kind: str) -> torch.Tensor:
    """fp32 `[KV heads, D, D]` of one layer."""

    def moment(name: str) -> torch.Tensor:
        x = found[layer, name]
        return x + LEAST * x.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(x.shape[-1]).double()

    cost = moment("query" if side == "K" else "o_proj")
    stored = moment(side if store == "token" else f"{side} spread")  # by channel a zero point takes the mean
    eye = torch.eye(cost.shape[-1]).double().expand_as(cost)
    hadamard = rotate(eye.float()).double()
    if kind in ("none", "hadamard"):
        return (eye if kind == "none" else hadamard).float()
    if kind == "key":
        return torch.linalg.eigh(stored)[1].float()
    if kind == "query":
        return (torch.linalg.eigh(cost if side == "K" else moment("output"))[1] @ hadamard).float()
    diagonal = (cost.diagonal(dim1=-2, dim2=-1) / stored.diagonal(dim1=-2, dim2=-1)).pow(0.25)
    return ((diagonal.diag_embed() if kind == "scale" else balanced(cost, stored)) @ hadamard).float()


def log_probabilities(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each row, `[tokens, vocabulary]`, of the last two thirds of its tokens, in fp16."""
    return [model(row[None]).logits[0, len(row) // 3 :].log_softmax(-1).half() for row in ids]


def damage(model: Any, ids: torch.Tensor, full: list[torch.Tensor]) -> dict[str, float]:
    """KL to `full`, the log probabilities of full precision, as attention is set now, and its standard error."""
    rows = zip(full, log_probabilities(model, ids), strict=True)
    kl = torch.stack([divergence(p.float(), q.float()).mean() for p, q in rows])
    return {"kl": round(kl.mean().item(), 6), "se": round((kl.std() / len(kl) ** 0.5).item(), 6)}


@torch.inference_mode()
def main() -> None:
    global chosen
    parser = argparse.ArgumentParser(description="KL of keys and values in few bits, by their rotation.")
    parser.add_argument("folder", type=Path, help="with models/ and data/")
    parser.add_argument("--rows", type=int, default=4, help="rows of text that judge")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--model", default="*", help="folder in models/, all if left out")
    parser.add_argument("--store", default="", help="a store, all if left out")
    options = parser.parse_args()
    AttentionInterface.register(NAME, attention)
    books = options.folder / "data" / "books"
    text = (books / "heldout.txt").read_text(encoding="utf-8")
    with lzma.open(books / "train.txt.xz", "rt", encoding="utf-8") as file:
        other = file.read(10 * FITTED[0] * FITTED[1])
    for path in sorted(path for path in (options.folder / "models").glob(options.model) if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids, chosen = rows_of(tokenizer, text, options.rows, options.tokens), None
        found, full = fit(model, rows_of(tokenizer, other, *FITTED)), log_probabilities(model, ids)
        settings = [
            (side, store, bits, kind)
            for side in "KV"
            for store in STORES[side]
            for bits in BITS
            for kind in KINDS[side]
            if options.store in ("", store)
        ]
        for side, store, bits, kind in settings:
            layers = range(len(model.model.layers))
            chosen = (side, store, bits, [matrix(found, n, side, store, kind) for n in layers])
            row = {"model": path.name, "side": side, "store": store, "bits": bits, "rotation": kind}
            print(json.dumps(row | damage(model, ids, full)), flush=True)


if __name__ == "__main__":
    main()
