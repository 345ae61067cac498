"""SageAttention2, Tables 2, 3, 5, 6, 8 and 9 in kind: accuracy of INT4 attention, without the paper's CogvideoX.

    python eval/papers/sage2.py                                # made Q, K, V, and those of the demo model
    python eval/papers/sage2.py --model MODEL --text FILE.txt  # of other models (--model A --model B)

- `granularity` (Tables 2, 3): scales of Q and K per token, thread, block or tensor, smoothed. Products with V are
  unquantized.
- `pv` (5, 6): number formats of weights and V. V has scales by channel; the method's `pv: int8` has scales by token.
- `smooth` (8, 9): smoothing of Q and K, with products with V in E4M3.

Rows have the cosine similarity of attention outputs in per cent, relative L1 and RMSE, for the average and the worst
layer. Made layers have channel biases in Q, K and V like the paper's Fig. 4, with more biases in later layers.

Fails if on some input an order of the paper does not hold in relative L1, on average and in the worst layer: token
below thread below block below tensor; smoothing K, or Q, below none; both below either. Other orders are `CLAIMS`, and
the command prints those that do not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qattn_kernels.ops.rotate.reference import transform

Figures = tuple[float, float, float]
LAYERS, HEADS, TOKENS, DIM = 6, 4, 1024, 64  # of what is made
Q_BLOCK, K_BLOCK, SEGMENT = 128, 64, 32
PAPER: dict[
    str, dict[str, tuple[Figures, Figures]]
] = {  # cosine similarity in percent, relative L1, RMSE: average, worst
    "granularity": {
        "token": ((99.45, 0.0649, 0.0335), (96.76, 0.1916, 0.0775)),
        "thread": ((99.45, 0.0622, 0.0313), (96.72, 0.1932, 0.0776)),
        "block": ((98.03, 0.1492, 0.0744), (90.68, 0.3615, 0.1490)),
        "tensor": ((97.15, 0.1800, 0.0865), (85.85, 0.4687, 0.2261)),
    },
    "pv": {
        "int8": ((77.05, 0.5618, 0.5044), (19.52, 0.9579, 1.4483)),
        "e5m2": ((99.20, 0.0905, 0.0903), (94.94, 0.2327, 0.2361)),
        "e4m3": ((99.44, 0.0683, 0.0347), (96.70, 0.1956, 0.0779)),
        "model": ((99.45, 0.0649, 0.0335), (96.76, 0.1916, 0.0775)),
    },
    "smooth": {
        "none": ((80.04, 0.3906, 0.2223), (4.83, 0.9979, 0.7784)),
        "hadamard": ((79.77, 0.3782, 0.2180), (4.85, 0.9978, 0.7785)),
        "smooth_attn": ((90.21, 0.3383, 0.1952), (64.49, 0.9262, 0.7204)),
        "k": ((98.07, 0.1493, 0.0743), (90.86, 0.3565, 0.1464)),
        "q": ((98.30, 0.1250, 0.0712), (93.10, 0.2989, 0.2195)),
        "both": ((99.46, 0.0648, 0.0334), (96.71, 0.1956, 0.0779)),
    },
}
Orders = list[tuple[str, str]]
ORDERS: dict[str, Orders] = {  # smaller error first
    "granularity": [("token", "thread"), ("thread", "block"), ("block", "tensor")],
    "pv": [("model", "e5m2"), ("e4m3", "e5m2")],
    "smooth": [("k", "none"), ("q", "none"), ("both", "k"), ("both", "q")],
}
# A claim of the paper, its table, its order, and the likely reason if ours differs.
CLAIMS: tuple[tuple[str, str, Orders, str], ...] = (
    (
        "smoothing Q is better than smoothing K, and K better than the other baselines",
        "smooth",
        [("q", "k"), ("k", "hadamard"), ("k", "smooth_attn")],
        "smoothing helps the side with larger biases, which here are the keys; a rotation spreads outliers of every "
        "kind, while a subtracted mean removes only biases",
    ),
    (
        "weights and values in E4M3 are better than in INT8, which breaks down",
        "pv",
        [("e4m3", "int8"), ("e5m2", "int8")],
        "INT8 drops weights below 1/254 of a row's largest; their total grows with longer and flatter rows, and rows "
        "have 1,024 tokens here and many thousands in a video",
    ),
)
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # Q `[Hq, S, D]`, K and V `[H, S, D]`, fp32
Found = dict[str, dict[str, list[float]]]  # of a table: by setting, `average` and `worst`, the three figures


@dataclass(frozen=True)
class Setting:
    """How a column computes: `bits` and granularity of Q and K, their smoothing, the format of weights and V."""

    granularity: str = "thread"
    smooth: str = "both"
    pv: str = "e4m3"
    bits: int = 4


SETTINGS = {
    "granularity": {name: Setting(granularity=name, pv="model") for name in PAPER["granularity"]},
    "pv": {name: Setting(granularity="token", pv=name) for name in PAPER["pv"]},
    "smooth": {name: Setting(smooth=name) for name in PAPER["smooth"]},
}


def groups(tokens: int, granularity: str, query: bool) -> torch.Tensor:
    """The group of each token, which shares one scale."""
    n, block = torch.arange(tokens), Q_BLOCK if query else K_BLOCK
    if granularity == "token":
        return n
    if granularity == "block":
        return n // block
    if granularity == "tensor":
        return torch.zeros_like(n)
    # per thread: of a query's segment tokens with equal n % 8, of a key's block those with equal (n % 8) // 2
    return n // SEGMENT * 8 + n % 8 if query else n // block * 4 + n % 8 // 2


def rounded(x: torch.Tensor, group: torch.Tensor, bits: int) -> torch.Tensor:
    """`[H, S, D]` as symmetric codes say it, one scale a group of tokens."""
    levels, top = 2 ** (bits - 1) - 1, x.abs().amax(-1)
    scale = torch.zeros(len(x), int(group.max()) + 1).scatter_reduce_(1, group.expand_as(top), top, "amax") / levels
    scale = scale.clamp(min=1e-12)[:, group, None]
    return torch.round(x / scale) * scale


def pv_product(p: torch.Tensor, v: torch.Tensor, form: str) -> torch.Tensor:
    """Weights in [0, 1] times V: weights scaled to the format's maximum, V by channel."""
    cast: dict[str, tuple[float, Callable[[torch.Tensor], torch.Tensor]]] = {
        "int8": (127.0, torch.round),
        "e4m3": (448.0, lambda x: x.to(torch.float8_e4m3fn).float()),
        "e5m2": (57344.0, lambda x: x.to(torch.float8_e5m2).float()),
        "model": (1.0, lambda x: x.half().float()),
    }
    most, to = cast[form]
    scale = torch.ones(()) if form == "model" else v.abs().amax(-2, keepdim=True).clamp(min=1e-12) / most
    return to(p * most) @ to(v / scale) * scale / most


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, at: Setting | None = None) -> torch.Tensor:
    """Compute attention `[Hq, S, D]`, exact or rounded as in `at`. Row sums are those of the unrounded weights."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    extra = torch.zeros(())
    if at is not None:
        if at.smooth in ("k", "both"):
            k = k - k.mean(-2, keepdim=True)
        if at.smooth in ("q", "both"):
            mean = q.mean(-2, keepdim=True)
            q, extra = q - mean, mean @ k.mT
        if at.smooth == "hadamard":
            q, k = transform(q), transform(k)
        if at.smooth == "smooth_attn":  # alpha 0.5
            factor = (k.abs().amax(-2, keepdim=True) / q.abs().amax(-2, keepdim=True).clamp(min=1e-12)).sqrt()
            q, k = q * factor, k / factor.clamp(min=1e-12)
        q, k = (rounded(x, groups(x.shape[1], at.granularity, x is q), at.bits) for x in (q, k))
    s = (q @ k.mT + extra) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p @ v if at is None else pv_product(p, v, at.pv)) / p.sum(-1, keepdim=True)


def accuracy(layers: list[Layer], causal: bool, at: Setting) -> dict[str, list[float]]:
    """`average` and `worst` layer: cosine similarity in percent, relative L1, RMSE."""
    found = []
    for q, k, v in layers:
        want, got = attend(q, k, v, causal), attend(q, k, v, causal, at)
        similar = torch.nn.functional.cosine_similarity(want.flatten(), got.flatten(), dim=0) * 100
        l1 = (got - want).abs().sum() / want.abs().sum()
        found.append((similar.item(), l1.item(), (got - want).pow(2).mean().sqrt().item()))
    columns = list(zip(*found, strict=True))
    worst = [min(columns[0]), max(columns[1]), max(columns[2])]
    return {
        "average": [round(sum(column) / len(column), 4) for column in columns],
        "worst": [round(x, 4) for x in worst],
    }


def made() -> list[Layer]:
    """Random layers whose channels are biased, as the paper's Fig. 4 shows, more of them from layer to layer."""
    generator, layers = torch.Generator().manual_seed(0), []
    for i in range(LAYERS):
        q, k, v = (torch.randn(HEADS, TOKENS, DIM, generator=generator) for _ in range(3))
        sizes = (2.0, 3.0, 1.0)
        some = [torch.rand(HEADS, 1, DIM, generator=generator) < (i + 1) / (4 * LAYERS) for _ in sizes]
        biases = [
            torch.randn(HEADS, 1, DIM, generator=generator) * size * chosen
            for size, chosen in zip(sizes, some, strict=True)
        ]
        layers.append((q + biases[0], k + biases[1], v + biases[2]))
    return layers


def of_model(path: Path, text: str) -> list[Layer]:
    """Q, K, V of every layer of a model that reads the text, after the rotary embedding."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: list[Layer] = []

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append((query[0].float(), key[0].float(), value[0].float()))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("sage2_capture", attention)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sage2_capture").eval()
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[:, :TOKENS]
    with torch.inference_mode():
        model(ids, use_cache=False)
    return layers


def broken(source: str, table: str, found: Found, orders: Orders | None = None) -> list[str]:
    """Return the orders that do not hold in relative L1. The default is the orders that the table requires."""
    return [
        f"{source}, {table}, {which}: {less} is not below {more}"
        for less, more in orders or ORDERS[table]
        for which in ("average", "worst")
        if found[less][which][1] >= found[more][which][1]
    ]


def contradicted(found: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each claim of the paper that a run's rows contradict, with the contradictions and the likely reason."""
    of: dict[tuple[str, str], Found] = {}
    for row in found:
        of.setdefault((row["source"], row["table"]), {})[row["setting"]] = row
    for says, table, orders, why in CLAIMS:
        wrong = [line for (s, t), figures in of.items() if t == table for line in broken(s, t, figures, orders)]
        if wrong:
            yield says, wrong, why


def rows(source: str, layers: list[Layer], causal: bool) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """A row a setting, and with the last of a table what does not hold in it."""
    for table, settings in SETTINGS.items():
        found = {name: accuracy(layers, causal, setting) for name, setting in settings.items()}
        for name, ours in found.items():
            average, worst = PAPER[table][name]
            row = {
                "source": source,
                "table": table,
                "setting": name,
                **ours,
                "paper": {"average": average, "worst": worst},
            }
            yield row, broken(source, table, found) if name == list(found)[-1] else []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="SageAttention2's accuracy tables, next to our figures.")
    parser.add_argument("--model", type=Path, action="append", help="folder of a model; the demo model by default")
    parser.add_argument("--text", type=Path, help="whose beginning it reads; sums by default")
    options = parser.parse_args(arguments)
    if options.model is None:
        from qattn_hf.assets import demo_model_dir

        options.model = [demo_model_dir()]
    question = "Question: Tom has 7 apples and buys 15 more. How many has he now?\nAnswer: 7 + 15 = 22. #### 22\n\n"
    text = options.text.read_text(encoding="utf-8")[: 16 * TOKENS] if options.text else question * 40
    found: list[dict[str, Any]] = []
    failed: list[str] = []
    for model in (None, *options.model):
        layers = made() if model is None else of_model(model, text)
        for row, wrong in rows("made" if model is None else model.name, layers, causal=model is not None):
            print(json.dumps(row), flush=True)
            found.append(row)
            failed += wrong
    for says, wrong, why in contradicted(found):
        print("\n".join([f"\nThe paper: {says}. Not here:", *wrong, f"Likely because {why}."]))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
