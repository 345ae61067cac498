"""What clipped ranges gain keys and values in 2 to 4 bits, by fake quantization: `eval/clipping.py DIR`.

    python eval/clipping.py ../shared        # every model of DIR/models on DIR/data/books/heldout.txt

Codes of a group of 128 reach over a part of its range around the middle, in KIVI's store: by channel for keys, by token
for values. `reach` is that part, or `least squares`: of each group the part whose squared error is least. `clip` of `b`
bits is the part `(2^b - 1) / (2^b - 1 + clip)`, 0.8 of 2 bits with `clip=0.75`. Keys or values alone are quantized, and
a text is read in one pass, as in `eval/rotations.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import rotations
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from qattn_hf.compare import rows_of
from qattn_kernels.ops.rotate.reference import rotate

SIDES = (("K", "kivi", "none"), ("K", "kivi", "hadamard"), ("V", "token", "none"))  # side, store, rotation
BITS = (2, 3, 4)
PARTS = (1.0, 0.95, 0.9, 0.8, 0.75, 0.7)
SEARCHED = tuple(1 - i / 20 for i in range(13))
LEAST = "least squares"


def reach_of(part: float | str) -> rotations.Reach:
    """What codes reach from and to, of groups `[..., tokens, D]`."""

    def reach(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(part, str):
            return clipped(x, part)
        low, high = clipped(x, 1.0)
        least = torch.full_like(low, torch.inf)
        for tried in SEARCHED:
            found = clipped(x, tried)
            error = (rotations.by_reach(x, *found, bits) - x).square().sum(-2)
            low, high = (torch.where(error < least, *pair) for pair in zip(found, (low, high), strict=True))
            least = torch.minimum(error, least)
        return low, high

    return reach


def clipped(x: torch.Tensor, part: float) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = rotations.whole(x, 0)
    cut = (high - low) * ((1 - part) / 2)
    return low + cut, high - cut


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="KL of keys and values in few bits, by how far their codes reach.")
    parser.add_argument("folder", type=Path, help="with models/ and data/")
    parser.add_argument("--rows", type=int, default=4, help="rows of text")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row")
    options = parser.parse_args()
    AttentionInterface.register(rotations.NAME, rotations.attention)
    text = (options.folder / "data" / "books" / "heldout.txt").read_text(encoding="utf-8")
    settings = [(*side, bits, part) for side in SIDES for bits in BITS for part in (*PARTS, LEAST)]
    for path in sorted(path for path in (options.folder / "models").iterdir() if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=rotations.NAME)
        ids = rows_of(AutoTokenizer.from_pretrained(path), text, options.rows, options.tokens)
        rotations.chosen = None
        full, heads = rotations.log_probabilities(model.eval(), ids), model.config.num_key_value_heads
        eye = torch.eye(model.model.layers[0].self_attn.head_dim).expand(heads, -1, -1)
        for side, store, rotation, bits, part in settings:
            matrix = eye if rotation == "none" else rotate(eye)
            rotations.chosen = (side, store, bits, [matrix] * len(model.model.layers))
            rotations.reach = reach_of(part)
            row = {
                "model": path.name,
                "side": side,
                "rotation": rotation,
                "bits": bits,
                "reach": part if part == LEAST else f"{part:g}",
            }
            print(json.dumps(row | rotations.damage(model, ids, full)), flush=True)


if __name__ == "__main__":
    main()
