"""Compare decode attention with BitDecoding's kernels, built from source: one JSON row per measurement.

    git clone --recurse-submodules https://github.com/DD-DuDa/BitDecoding
    python eval/record.py speed-bitdecoding -- python eval/bitdecoding.py BitDecoding

Packed methods and SDPA are measured as in `qattn bench decode`: a layer's whole step in bfloat16, which writes the new
token and closes blocks. BitDecoding (Du et al., arXiv 2503.18773; float16) is measured for attention alone, over packed
keys by channel and values by token in groups of 128. Both use the same timing: many calls in one CUDA graph, over
buffers that have left the L2 cache. `difference` is the mean absolute difference from float16 attention, divided by the
mean absolute output; it would show a wrong result. Needs `nvcc` and a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load

from qattn_hf.bench import decode
from qattn_hf.bench.layers import Heads
from qattn_hf.bench.timing import attempt, capture, check_finite, measure, release, working_sets
from qattn_hf.recipes.recipe import find_recipes

POINTS = "1x4096,1x32768,1x131072,16x4096,16x32768,64x512,64x4096"
METHODS = "turbo,kivi:bits=4,group_size=128,kivi:bits=2,group_size=128,residual_length=32"
GROUP = 128
# what its `setup.py` gives nvcc, for this GPU alone
FLAGS = [
    "-O3", "-std=c++17", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "--use_fast_math",
]  # fmt: skip


def build(source: Path) -> Any:
    """The extension module of a checkout of BitDecoding, submodules included."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    csrc = source.resolve() / "csrc" / "bit_decode"
    return load(
        "bit_decode_cuda",
        sources=[str(csrc / "decode_api.cpp"), *map(str, sorted((csrc / "src" / "genfile").glob("*.cu")))],
        extra_include_paths=[str(csrc), str(csrc / "src"), str(source.resolve() / "libs" / "cutlass" / "include")],
        extra_cflags=["-O3", "-std=c++17"],
        extra_cuda_cflags=FLAGS,
    )


class Packed:
    """A packed cache of random keys and values, `bits` bits, and its attention.

    Args:
        library: the extension. query, keys, values: `[B, 1 or S, H, D]`, float16.
    """

    def __init__(self, library: Any, bits: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        batch, tokens, heads, dim = keys.shape
        each = 16 // bits  # codes in a number
        packed = partial(torch.zeros, dtype=torch.uint16, device=keys.device)
        scales = partial(torch.zeros, dtype=torch.float32, device=keys.device)
        self.query, self.attend = query, getattr(library, f"fwd_kvcache_i{bits}")
        self.keys = packed((batch, tokens // each, heads, dim)), scales((batch, tokens // GROUP, heads, dim))
        self.values = packed((batch, tokens, heads, dim // each)), scales((batch, dim // GROUP, heads, tokens))
        ends = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=keys.device)
        flat = [x.reshape(batch * tokens, heads, dim) for x in (keys, values)]
        pack = getattr(library, f"kvcache_pack_i{bits}")
        pack(flat[0], *self.keys, flat[1], *self.values, None, ends, tokens, "k-channel", GROUP)

    def __call__(self) -> torch.Tensor:
        scale = self.query.shape[-1] ** -0.5
        rest = "k-channel", GROUP, False, -1, -1, 0.0, True, 0
        out: torch.Tensor = self.attend(self.query, *self.keys, *self.values, None, scale, *rest)
        return out

    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(x.nbytes for x in (*self.keys, *self.values))


@torch.no_grad()
def timed(library: Any, bits: int, point: decode.Point, heads: Heads, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a call, and its difference from float16 attention."""

    def numbers(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(point.batch, tokens, count, heads.dim, dtype=torch.float16, device=device)

    query, keys, values = numbers(1, heads.query), numbers(point.context, heads.kv), numbers(point.context, heads.kv)
    first = Packed(library, bits, query, keys, values)
    out = first()
    check_finite(out)
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    difference = float((out - want.transpose(1, 2)).abs().mean() / want.abs().mean())
    sets = working_sets(first.nbytes(), device)
    caches = [first, *(Packed(library, bits, query, keys, values) for _ in range(sets - 1))]
    steps = caches * -(-decode.SDPA_STEPS // sets)
    times = measure(capture(steps, device), device)
    return {"ms": round(times.median / len(steps), 6), "difference": round(difference, 4), "kv_bytes": first.nbytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of BitDecoding with its submodule")
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args()
    library, heads, device = build(options.source), Heads(), torch.device("cuda")
    points = [decode.Point(*map(int, text.split("x"))) for text in options.points.split(",")]
    methods = {name: recipe.settings for name, recipe in find_recipes([options.methods]).items()}
    for row in decode.rows(points, methods, heads, device):
        print(json.dumps(row), flush=True)
    for point in points:
        for bits in (4, 2):
            figures = attempt(partial(timed, library, bits, point, heads, device), ours=True)
            shape = {"bench": "decode", **point._asdict(), **heads.row(), "dtype": "float16", "device": "cuda"}
            print(json.dumps({**shape, "way": f"BitDecoding, {bits} bit", "packed": True, **figures}), flush=True)
            release(device)


if __name__ == "__main__":
    main()
