"""What error compensation gains keys in 2 and 3 bits, by fake quantization: `eval/compensation.py MODEL...`.

    python eval/compensation.py --data ../shared/data ../shared/models/tiny-llama-28m tiny-qwen2-14m

GPTQ's rounding (Frantar et al., arXiv 2210.17323, Algorithm 1) for cached keys: the channels of a rotated key are
rounded one after another, and what each loses the ones behind it make up for, so that little is left where queries
multiply it. `H` is the second moment of the queries that share a KV head, of another text, after RoPE and in the keys'
rotation; to its diagonal `damp` times its mean is added. Where GPTQ finds the weights of a layer, this finds the codes
of a token: with `H` known before, a block of keys can be rounded so when it closes.

Keys alone are quantized, rotated by the Hadamard matrix, in KIVI's store: groups of 128 tokens by channel, over 0.8 of
their range for 2 bits, all of it for 3. `pool`: how many tokens of a head, those of the smallest keys, are left out as
SinkQ's are.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clipping
import rotations
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from qattn_hf.compare import rows_of
from qattn_kernels.formats.kivi.reference import asymmetric, encode
from qattn_kernels.ops.rotate.reference import rotate

GROUP = rotations.GROUP
FITTED = (12, 1024)  # rows and tokens that `H` is of
BITS, POOLS, DAMPS = (2, 3), (0, 3), (None, 0.1)
REACH = {2: 0.8, 3: 1.0}


def factor(moment: torch.Tensor, damp: float) -> torch.Tensor:
    """fp32 `[heads, D, D]`: the upper Cholesky factor of the inverse of `H` `[heads, D, D]`."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damped = moment + damp * mean * torch.eye(moment.shape[-1], dtype=moment.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()


def compensated(
    x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, bits: int, upper: torch.Tensor
) -> torch.Tensor:
    """Groups `[B, H, groups, 128, D]` as they are read from codes whose errors make up for one another.

    Args:
        step, zero: `[B, H, groups, 1, D]`. upper: `factor` of each head.
    """
    left, found = x.clone(), torch.empty_like(x)
    for d in range(x.shape[-1]):
        code = encode(left[..., d], step[..., d], zero[..., d], bits)
        found[..., d] = code * step[..., d].float() + zero[..., d].float()
        error = (left[..., d] - found[..., d]) / upper[:, d, d][:, None, None]
        left[..., d + 1 :] -= error[..., None] * upper[:, d, d + 1 :][:, None, None]
    return found


def reader(bits: int, pool: int, factors: list[torch.Tensor] | None) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """In place of `rotations.read`: keys `[B, H, T, D]` of a layer as they are read back."""

    def read(x: torch.Tensor, layer: int) -> torch.Tensor:
        whole = x.shape[2] // GROUP * GROUP
        sinks = torch.zeros((*x.shape[:2], whole), dtype=torch.bool)
        if pool:
            sinks.scatter_(2, x[:, :, :whole].norm(dim=-1).topk(pool, largest=False).indices, True)
        turned, out = rotate(x[:, :, :whole]).unflatten(2, (-1, GROUP)), sinks.unflatten(2, (-1, GROUP))[..., None]
        mean = (turned * ~out).sum(3, keepdim=True) / (~out).sum(3, keepdim=True)
        low, high = clipping.clipped(torch.where(out, mean, turned), REACH[bits])
        step, zero = (y[..., None, :] for y in asymmetric(low, high, bits))
        if factors is None:
            back = encode(turned, step, zero, bits) * step.float() + zero.float()
        else:
            back = compensated(turned, step, zero, bits, factors[layer])
        back = torch.where(out, turned, back).flatten(2, 3)
        eye = rotate(torch.eye(x.shape[-1]))
        return torch.cat([back @ eye.mT, x[:, :, whole:]], 2)

    return read


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="KL of keys in few bits, with error compensation and without.")
    parser.add_argument("models", type=Path, nargs="+", help="folders")
    parser.add_argument("--data", type=Path, required=True, help="folder with books/")
    parser.add_argument("--rows", type=int, default=4, help="rows of text that judge")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row")
    options = parser.parse_args()
    AttentionInterface.register(rotations.NAME, rotations.attention)
    text = (options.data / "books" / "heldout.txt").read_text(encoding="utf-8")
    with lzma.open(options.data / "books" / "train.txt.xz", "rt", encoding="utf-8") as file:
        other = file.read(10 * FITTED[0] * FITTED[1])
    for path in options.models:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=rotations.NAME)
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids, rotations.chosen = rows_of(tokenizer, text, options.rows, options.tokens), None
        found = rotations.fit(model.eval(), rows_of(tokenizer, other, *FITTED))
        full, layers = rotations.log_probabilities(model, ids), len(model.model.layers)
        eye = rotate(torch.eye(model.model.layers[0].self_attn.head_dim)).double()
        turned = [eye.mT @ found[layer, "query"] @ eye for layer in range(layers)]
        for bits, pool, damp in [(bits, pool, damp) for bits in BITS for pool in POOLS for damp in DAMPS]:
            rotations.chosen = ("K", "kivi", bits, [])
            rotations.read = reader(bits, pool, None if damp is None else [factor(moment, damp) for moment in turned])
            rounding = "each channel alone" if damp is None else f"compensated, damp {damp:g}"
            row = {"model": path.name, "bits": bits, "pool": pool, "rounding": rounding}
            print(json.dumps(row | rotations.damage(model, ids, full)), flush=True)


if __name__ == "__main__":
    main()
