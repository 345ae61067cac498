"""SageAttention2, Tables 4 and 13, Fig. 7: sums with 13 mantissa bits, the FP32 buffer, smoothing V; no model is read.

Ada adds up FP8 products in FP22 (1 sign, 8 exponent and 13 mantissa bits). Here an FP32 sum is rounded after every 32
tokens. The buffer sums each block of 64 separately, in FP32. Made values have channels between 8 and 9.

Fails if FP22 changes a number with 13 mantissa bits or keeps all 23; if the buffer does not lower the error of sums; or
if smoothed values do not lower attention's error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from papers.common import About, Row, Run, column, not_below, row

ABOUT = About(
    title="SageAttention2, Tables 4 and 13, Fig. 7",
    model="",
    missing="Table 4 measures Ada's tensor cores, Table 13 layers of CogvideoX, and Fig. 7 has no numbers. The paper "
    "does not say how FP22 rounds; this table rounds to nearest.",
)
TOKENS, DIM, MMA, BLOCK, QUERIES = 4096, 64, 32, 64, 64
TABLE_4 = {"E8M13": "0", "E8M23": "that of FP22"}  # error of the accumulator relative to FP32
TABLE_13 = {"as they are": (98.25, 0.1980, 0.2387), "smoothed": (99.75, 0.0406, 0.0773)}
NUMBERS, SUMS, VALUES = "numbers", "sums of P V", "values"


def fp22(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to 13 mantissa bits, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + (1 << 9)) & ~((1 << 10) - 1)).view(torch.float32)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


def product(p: torch.Tensor, v: torch.Tensor, buffer: bool, short: bool = True) -> torch.Tensor:
    """`p @ v` in FP22, with the FP32 buffer or without; `short=False`: in FP32."""
    if not short:
        return p @ v
    total = torch.zeros(p.shape[0], v.shape[1])
    acc = torch.zeros_like(total)
    for start in range(0, p.shape[1], MMA):
        acc = fp22(acc + p[:, start : start + MMA] @ v[start : start + MMA])
        if buffer and (start + MMA) % BLOCK == 0:
            total, acc = total + acc, torch.zeros_like(acc)
    return total + acc


def figures(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    similar = torch.nn.functional.cosine_similarity(want.flatten(), got.flatten(), dim=0).item()
    l1 = ((got - want).abs().sum() / want.abs().sum()).item()
    return {"cosine": 100 * similar, "relative_l1": l1, "rmse": (got - want).pow(2).mean().sqrt().item()}


def measure(run: Run | None) -> Iterator[Row]:
    g = torch.Generator().manual_seed(0)
    fine = torch.randn(4096, generator=g)
    for name, x in (("E8M13", fp22(fine)), ("E8M23", fine)):
        yield row(NUMBERS, name, {"error": TABLE_4[name]}, {"error": (fp22(x) - x).abs().max().item()})
    p = torch.exp(torch.randn(QUERIES, TOKENS, generator=g))
    p, v = e4m3(p / p.amax(-1, keepdim=True) * 448), torch.randn(TOKENS, DIM, generator=g)
    v += 8.5 * torch.randn(1, DIM, generator=g).sign()  # either only positive or only negative
    for name, buffer in (("FP22", False), ("FP22, FP32 buffer", True)):
        coded = e4m3(v)
        yield row(SUMS, name, {}, figures(product(p, coded, buffer), product(p, coded, buffer, short=False)))
    mean, weight = v.mean(0), p.sum(-1, keepdim=True)
    want = (p @ v) / weight
    smoothed = product(p, e4m3(v - mean), True) / weight + mean
    for name, got in (("as they are", product(p, e4m3(v), True) / weight), ("smoothed", smoothed)):
        paper = dict(zip(("cosine", "relative_l1", "rmse"), TABLE_13[name], strict=True))
        yield row(VALUES, name, paper, figures(got, want))


def broken(rows: list[Row]) -> list[str]:
    error = column(rows, NUMBERS, "error")
    wrong = not_below(column(rows, SUMS, "relative_l1"), [("FP22, FP32 buffer", "FP22")], SUMS)
    wrong += not_below(column(rows, VALUES, "relative_l1"), [("smoothed", "as they are")], VALUES)
    if error["E8M13"] or not error["E8M23"]:
        wrong.append(f"{NUMBERS}: FP22 keeps other than 13 mantissa bits")
    return wrong
