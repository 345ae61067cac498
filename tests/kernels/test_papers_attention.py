"""The papers' attention in `reference/papers/` equals a layer's computation bit for bit.

A sum of integers does not depend on its order. For floating-point products the inputs have few bits, and a tile has one
value per channel, so that sums are exact. Over at most four tiles torch adds in the order of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SAGE1, make_layer, random_qkv

from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.rotate.reference import rotate
from qattn_kernels.reference.papers import turbo_attention as turbo
from qattn_kernels.reference.papers.int_flash_attention import int_flash_attention
from qattn_kernels.reference.papers.online_softmax import Result, flash_attention, join
from qattn_kernels.reference.papers.sage_attention import sage_attention
from qattn_kernels.step.stock_cache import attend_over

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LENGTHS = (33, 64, 150, 230)
ids = {"ids": lambda given: "-".join(map(str, given.values())) or "default"}


def one_order(tokens: int, heads: int = 2) -> Inputs:
    """Inputs of 4 query heads whose products with unrounded keys and weights are exact, whatever the order of sums."""
    g = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(2, h, tokens, 64, generator=g).mul(4).round() / 4 for h in (4, heads))
    v = torch.zeros(2, heads, tokens, 64)
    channel = torch.cat([torch.randperm(64, generator=g) for _ in range(-(-tokens // 64))])[:tokens]
    v[..., torch.arange(tokens), channel] = torch.randn(2, heads, tokens, generator=g).mul(16).round() / 16
    return q, k, v


def around_a_mean(v: torch.Tensor) -> torch.Tensor:
    """The values of `one_order` around a mean, which smoothing subtracts exactly: each second tile is the first's
    negative."""
    pairs = v.shape[2] // 128 * 128
    first = v[:, :, :pairs].unflatten(2, (-1, 2, 64))[:, :, :, :1]
    tiles = torch.cat([first, -first], 3).flatten(2, 4)
    return torch.nn.functional.pad(tiles, (0, 0, 0, v.shape[2] - pairs)) + torch.arange(v.shape[3]) / 8


def by_layer(layer: QAttnLayer, inputs: Inputs, cuts: list[int]) -> Result:
    """What a layer returns for calls that end at `cuts`: `[B, Hq, T, D]` and `[B, Hq, T]`."""
    found, start = [], 0
    for end in cuts:
        q, k, v = (x[:, :, start:end] for x in inputs)
        handle, _ = layer.update(k, v)
        span = torch.tensor([[0, end - start]], dtype=torch.int32)
        found.append(layer.attend(q, handle, span, Scores(q.shape[-1] ** -0.5)))
        start = end
    return Result(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


def by_head(inputs: Inputs, paper: Callable[..., Result]) -> Result:
    """The same of `paper(Q, K, V, head)`, which knows one KV head of one row, the softmax scale in its queries."""
    q, k, v = inputs
    q = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))
    rows = [join_heads([paper(q[b, h], k[b, h], v[b, h], h) for h in range(k.shape[1])]) for b in range(len(q))]
    return Result(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def join_heads(heads: list[Result]) -> Result:
    return Result(*(torch.cat(parts) for parts in zip(*heads, strict=True)))


def assert_same_bits(found: Result, want: Result) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_exact_attention_is_flash_attention_2(tokens: int, heads: int):
    """A prefill, then steps of one query each."""
    inputs, cuts = one_order(tokens, heads), [tokens - 3, tokens - 2, tokens - 1, tokens]
    found = by_layer(make_layer(("none", {}), heads=heads), inputs, cuts)
    assert_same_bits(found, by_head(inputs, lambda Q, K, V, h: flash_attention(Q, K, V)))


TURBO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"bits": 2}, {"k_bits": 2, "v_bits": 2}),
    ({"k_bits": 4, "v_bits": 2, "softmax": "sas"}, {"v_bits": 2, "softmax": "sas"}),
    ({"softmax": "sas", "sas_threshold": -3.0}, {"softmax": "sas", "n_r": -3.0}),
    ({"p_scale": "tile"}, {"p_scale": "tile"}),
    ({"p_scale": "tile", "block_q": 32}, {"p_scale": "tile", "B_r": 32}),
    ({"block_q": 128}, {"B_r": 128}),
    ({"block_kv": 128, "buffer_size": 128}, {"B_c": 128, "buffer": 128}),
    ({"buffer_size": 128}, {"buffer": 128}),
]


def turbo_by_head(inputs: Inputs, prompt: int, settings: Callable[[int, int], turbo.Settings]) -> Result:
    """Algorithm 1 over the first `prompt` tokens, then Algorithm 2 token by token; `settings` of a row and KV head."""
    rows = []
    for b in range(len(inputs[0])):

        def paper(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, h: int, b: int = b) -> Result:
            own = settings(b, h)
            first, cache = turbo.prefill(Q[:, :prompt], K[:prompt], V[:prompt], own)
            steps = (slice(t, t + 1) for t in range(prompt, len(K)))
            return join([first, *(turbo.decode(Q[:, t], K[t], V[t], cache, own) for t in steps)])

        rows.append(by_head(tuple(x[b : b + 1] for x in inputs), paper))  # type: ignore[arg-type]
    return Result(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


@pytest.mark.parametrize(("given", "paper"), TURBO, **ids)
@pytest.mark.parametrize("prompt", LENGTHS)
def test_turbo_is_algorithms_1_and_2(prompt: int, given: dict[str, Any], paper: dict[str, Any]):
    """A prompt, then steps. Some steps close a block and read it from its codes."""
    inputs = random_qkv(2, min(prompt + 40, 255), seed=prompt, dim=64)
    cuts = [prompt, *range(prompt + 1, inputs[0].shape[2] + 1)]
    found = by_layer(make_layer(("paper_turbo", {"sink_num": 0, **given})), inputs, cuts)
    assert_same_bits(found, turbo_by_head(inputs, prompt, lambda b, h: turbo.Settings(**paper)))


def test_many_queries_at_once_have_the_numbers_of_single_steps():
    inputs = random_qkv(2, 150, dim=64)
    found = by_layer(make_layer(("turbo", {"sink_num": 0})), inputs, [100, 120, 150])
    assert_same_bits(found, turbo_by_head(inputs, 100, lambda b, h: turbo.Settings()))


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_turbo_ranks_its_heads_as_the_paper(dim: int):
    """The heads of lowest priority in a row's first block get 2 bits, of keys and of values apart."""
    g = torch.Generator().manual_seed(dim)
    inputs = (
        torch.randn(3, 4, 140, dim, generator=g),
        *(torch.randn(3, 4, 140, dim, generator=g) * torch.rand(3, 4, 1, dim, generator=g) for _ in "kv"),
    )

    def settings(b: int, h: int) -> turbo.Settings:
        bits = []
        for x in inputs[1:]:
            priorities = [turbo.priority(turbo.first_stage(turbo.quantize(head[:64]))) for head in x[b]]
            bits.append(2 if sum(other < priorities[h] for other in priorities) < 2 else 4)
        return turbo.Settings(*bits)

    found = by_layer(make_layer(("turbo", {"bits": "mixed", "sink_num": 0}), heads=4), inputs, [120, *range(121, 141)])
    assert_same_bits(found, turbo_by_head(inputs, 120, settings))


INT_FLASH: list[dict[str, Any]] = [
    {},
    {"mode": "half"},
    {"bits": 4},
    {"mode": "half", "bits": 4},
    {"v_granularity": "tensor"},
    {"bits": 4, "rotate": "hadamard"},
]


@pytest.mark.parametrize("settings", INT_FLASH, **ids)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_int_flash_is_algorithm_1(tokens: int, settings: dict[str, Any]):
    """A prefill, in two calls if there are enough tokens, then single steps."""
    q, k, v = one_order(tokens + 3)
    cuts = [64, tokens, *range(tokens + 1, tokens + 4)] if tokens > 96 else [tokens, *range(tokens + 1, tokens + 4)]
    found = by_layer(make_layer(("paper_int_flash", settings)), (q, k, v), cuts)
    options = {{"v_granularity": "v_scale"}.get(key, key): x for key, x in settings.items() if key != "rotate"}
    if "rotate" in settings:
        q, k = rotate(q), rotate(k)

    def paper(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, h: int) -> Result:
        parts = [int_flash_attention(Q[:, :tokens], K[:tokens], V[:tokens], **options)]
        for t in range(tokens, tokens + 3):
            parts.append(int_flash_attention(Q[:, t : t + 1], K[: t + 1], V[: t + 1], decode=True, **options))
        return join(parts)

    assert_same_bits(found, by_head((q, k, v), paper))


SAGE: list[dict[str, Any]] = [
    {},
    {"bits": 4},
    {"bits": 4, "granularity": "token", "smooth_q": "block"},
    {"granularity": "block", "smooth_q": "tensor", "smooth_v": True},
    {"smooth_k": False, "pv": "e5m2"},
    SAGE1,
]


def sage_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Of the method's settings those that the paper's function takes."""
    return {"smooth_q": "tensor" if settings.get("bits") == 4 else "none", **settings}


@pytest.mark.parametrize("settings", SAGE, **ids)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_sage2_is_algorithm_1(tokens: int, settings: dict[str, Any]):
    q, k, v = one_order(tokens)
    inputs = (q, k, around_a_mean(v) if settings.get("smooth_v") else v)
    found = by_layer(make_layer(("paper_sage2", settings)), inputs, [tokens])
    assert_same_bits(found, by_head(inputs, lambda Q, K, V, h: sage_attention(Q, K, V, **sage_options(settings))))


@pytest.mark.parametrize("settings", [*SAGE, {"granularity": "tensor"}], **ids)
@pytest.mark.parametrize("queries", [1, 40, 150])
def test_sage2_over_a_stock_cache_is_algorithm_1(queries: int, settings: dict[str, Any]):
    """The paper's plug-in: the last queries over all that transformers' own cache holds."""
    q, k, v = one_order(230)
    v = around_a_mean(v) if settings.get("smooth_v") else v
    spec = get_method("paper_sage2")(cache="model", **settings).last_layer_spec(2)
    mask = torch.ones(2, 230, dtype=torch.bool)
    out = attend_over(q[:, :, -queries:], k, v, mask, 230 - queries, spec, Scores(0.125))
    want = by_head((q[:, :, -queries:], k, v), lambda Q, K, V, h: sage_attention(Q, K, V, **sage_options(settings)))
    assert_same_bits(Result(*out), want)


@pytest.mark.parametrize("case", ["none", "sage2", "int_flash"])
def test_inputs_of_any_kind_agree_within_the_order_of_sums(case: str):
    inputs = random_qkv(2, 600, dim=80)
    paper = {"none": flash_attention, "sage2": sage_attention, "int_flash": int_flash_attention}[case]
    found = by_layer(make_layer((case, {}), 1024), inputs, [600])
    torch.testing.assert_close(found, by_head(inputs, lambda Q, K, V, h: paper(Q, K, V)), rtol=0, atol=5e-6)
