"""The whole step in Triton has its specification's state bit for bit, and outputs within the codes' error."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import triton
import triton.language as tl
from helpers import DEVICE, Case, case_id, error, make_layer, spoil
from kernel_cases import BY_CHANNELS, CASES, FORMATS, INT8, KIVI, LONG, MORE_CASES, NONE, SMOOTHED, TURBO, TWO_BITS
from latent_cases import step

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.formats.fp8.jit import quantize_tokens as quantize_fp8
from qattn_kernels.formats.fp8.reference import fp8_tokens
from qattn_kernels.launch.call import make_call
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL
from qattn_kernels.layer.state import side_of
from qattn_kernels.layer.step import Step
from qattn_kernels.layer.support import unsupported
from qattn_kernels.ops.append.launch import finish
from qattn_kernels.ops.crop.reference import crop
from qattn_kernels.ops.rotate.reference import rotate, rotate_back, rotated
from qattn_kernels.ops.sink_pool.table import read_sinks
from qattn_kernels.step.kernels import fused_step, write_long
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
ON_GPU = DEVICE == "cuda"
THREE_BITS: Case = ("turboquant", {"k_format": "turbo3", "v_format": "turbo3"})
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU: too large for the interpreter")
ROUNDING = 0.04  # kernels and reference round queries and weights to 8 bits, or queries to 4, each in its own way
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    rows: int, tokens: int, heads: int = 2, group: int = 1, dim: int = 64, kind: str = "normal", seed: int = 0
) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, h, tokens, dim, generator=g) for h in (heads * group, heads, heads))
    if kind == "peaked":
        q *= 4
    if kind == "outlier":
        k[..., 3] += 20
        k[..., 17] *= 12
        v[..., 5] += 9
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def feed(run, layer: QAttnLayer, qkv: Inputs, cuts: list[int], first: int = 0, scores: Scores | None = None) -> list:
    """Outputs of calls that end at `cuts`; row 0 begins with `first` columns of padding."""
    out, start = [], 0
    for end in cuts:
        out.append(step(run, layer, qkv, start, end, min(max(first - start, 0), end - start), scores)[0])
        start = end
    return out


def closes_again(run, layer: QAttnLayer, first: Inputs, again: Inputs, cuts: list[int]) -> None:
    """A block of 64 tokens closes, a crop leaves its first token, and calls that end at `cuts` bring others."""
    step(run, layer, first, 0, 64)
    crop(layer.state, layer.spec, 63)
    for start, end in pairwise([1, *cuts]):
        step(run, layer, again, start, end)


def differing(a: QAttnLayer, b: QAttnLayer) -> list[str]:
    return [name for name in a.state if not torch.equal(a.state[name], b.state[name])]


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(c, marks=needs_gpu) for c in MORE_CASES], ids=lambda c: case_id(c)
)
def test_state_is_the_references_bit_for_bit(case: Case):
    """Long and short calls, padding, tokens that are not finite, blocks that close in each kind of call."""
    qkv = inputs(2, 200)
    qkv[1][1, 0, 30, 1] = math.nan
    qkv[2][0, 1, 61, 2] = math.inf
    cuts = [20, 60, 63, 64, 65, 129, 130, 192, 200] if ON_GPU else [63, 64, 65, 129, 130]
    one, other = make_layer(case, 256), make_layer(case, 256)
    want = feed(reference_step, one, qkv, cuts, first=5)
    got = feed(fused_step, other, qkv, cuts, first=5)
    assert differing(one, other) == []
    # the INT8 pairs of packed codes, and queries in fp16, leave 1e-4 where the reference has floats; products of floats
    # differ by their order alone
    floats = 1e-5 if case[0] == "none" else 1e-3
    int8 = "int8" in (one.spec.compute.decode, one.spec.compute.prefill)
    limit = ROUNDING if int8 else 2e-3 if case[1].get("softmax") else floats
    assert all(error(a, b) < limit for a, b in zip(got, want, strict=True))
    assert torch.equal(got[0][0, :, :5], torch.zeros_like(got[0][0, :, :5]))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 33], ids=["short", "long"])
def test_columns_of_padding_in_the_last_of_many_rows(tokens: int):
    """More rows than one program takes at once when it commits their lengths."""
    q, k, v = inputs(34, tokens, heads=1)
    span = torch.tensor([[0, tokens]] * 33 + [[2, tokens - 2]], dtype=torch.int32, device=DEVICE)
    one, other = make_layer(INT8, 64, 1), make_layer(INT8, 64, 1)
    for run, layer in ((reference_step, one), (fused_step, other)):
        layer.lazy_initialization(k, v)
        run(q, k, v, span, layer.state, layer.spec, Scores(q.shape[-1] ** -0.5), *([0] if run is fused_step else []))
    assert differing(one, other) == []
    assert other.state["padded"] == 2 and other.state["columns_seen"] == tokens


@pytest.mark.parametrize("case", SMOOTHED, ids=case_id)
@pytest.mark.parametrize("cuts", [[2], [63, 64], [64]], ids=["not yet", "step", "prefill"])
def test_a_block_that_closes_again_leaves_nothing_of_the_first_time(case: Case, cuts: list[int]):
    """After a crop the block has other tokens, a masked one where a finite one stood, and the other way round."""
    first, again = inputs(1, 64), inputs(1, 64, seed=1)
    first[1][0, 0, 20, 1] = math.nan
    again[1][0, 0, 63 if len(cuts) == 2 else 40, 1] = math.nan
    one, other = make_layer(case, 128), make_layer(case, 128)
    for run, layer in ((reference_step, one), (fused_step, other)):
        closes_again(run, layer, first, again, cuts)
    assert differing(one, other) == []


@pytest.mark.parametrize("case", FORMATS, ids=case_id)
@pytest.mark.parametrize("tokens", [2, 31] if ON_GPU else [2])
def test_several_queries_are_single_steps(case: Case, tokens: int):
    """Drafted tokens, across the end of a block, in one call: the numbers of one by one."""
    qkv = inputs(1, 64 + tokens, heads=1)
    start = 63 if tokens == 2 else 50
    steps, drafts = make_layer(case, 256, 1), make_layer(case, 256, 1)
    one = feed(fused_step, steps, qkv, [start, *range(start + 1, start + tokens + 1)])[1:]
    many = feed(fused_step, drafts, qkv, [start, start + tokens])[1]
    assert differing(steps, drafts) == []
    torch.testing.assert_close(many, torch.cat(one, 2), atol=1e-5, rtol=1e-5)  # fp32 sums of other splits


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5, 31] if ON_GPU else [1, 5])
def test_every_pair_of_widths(tokens: int):
    """Four heads with 4 and 4 bits, 4 and 2, 2 and 4, 2 and 2. Each pair has a separate loop."""
    case = ("turbo", {"bits": "mixed", "k_low_heads": [[2, 3]], "v_low_heads": [[1, 3]]})
    qkv = inputs(1, 200 + tokens, heads=4)
    want = feed(reference_step, make_layer(case, 256, 4), qkv, [200, 200 + tokens])[1]
    got = feed(fused_step, make_layer(case, 256, 4), qkv, [200, 200 + tokens])[1]
    assert max(error(a, b) for a, b in zip(got.unbind(1), want.unbind(1), strict=True)) < 0.04


def test_zero_points_of_256_biased_channels():
    """The largest sum of zero points that there can be: all channels at one end of INT8, met by equal queries."""
    q, k, v = inputs(1, 66, heads=1, dim=256)
    qkv = (torch.ones_like(q), 5 + 0.05 * k.sign() * torch.rand_like(k), v)
    want = feed(reference_step, make_layer(TURBO, 128, 1), qkv, [65, 66])[1]
    got = feed(fused_step, make_layer(TURBO, 128, 1), qkv, [65, 66])[1]
    assert error(got, want) < 0.04


@pytest.mark.parametrize("n_h", [0, 2])
def test_mixed_heads_may_all_have_one_width(n_h: int):
    case, qkv = ("turbo", {"bits": "mixed", "n_h": n_h}), inputs(1, 131)
    one, other = make_layer(case, 192), make_layer(case, 192)
    want, got = (feed(run, layer, qkv, [130, 131]) for run, layer in ((reference_step, one), (fused_step, other)))
    assert differing(one, other) == []
    assert max(map(error, got, want)) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cuts"), [({"sink_num": 2}, [50, 64, 69]), ({"buffer_size": 128}, [120, 128, 133])], ids=str
)
def test_heads_are_ranked_in_the_step_that_closes_a_rows_first_blocks(settings: dict[str, int], cuts: list[int]):
    """Rows close their first blocks in different calls, or two at once. Each of the four heads ranks all heads."""
    case, qkv = ("turbo", {"bits": "mixed", **settings}), inputs(2, 140, heads=4, dim=32)
    qkv[1][1, 2, 30, 1] = math.nan
    qkv[2][:] *= torch.tensor([3.0, 1.0, 4.0, 2.0], device=DEVICE)[:, None, None]
    qkv[1][:, 1] = 5 + 0.1 * qkv[1][:, 1]
    qkv[1][:, 1, 20, :16] = 0.0  # a sink alone makes channels of this head wide
    one, other = make_layer(case, 256, 4), make_layer(case, 256, 4)
    for run, layer in ((reference_step, one), (fused_step, other)):
        feed(run, layer, qkv, cuts, first=5)
    assert differing(one, other) == []
    assert other.state["v.head_of"].tolist() == [[0, 2, 1, 3]] * 2  # those of large values have 4 bits


HEAD_DIMS = [(64, 8), (80, 3), (96, 1), (128, 4), (128, 12), (256, 2), (256, 8)]
DIMS_OF = [(case, *sizes) for case in (CASES if ON_GPU else [TURBO]) for sizes in HEAD_DIMS]
DIMS_OF += [(THREE_BITS, 256, 2)]  # lookups want neighbours in one thread, also where two warps share a tile
if not ON_GPU:  # a head dim that is no power of two, and the largest, of formats that have their own way with them
    DIMS_OF += [(case, 80, 3) for case in BY_CHANNELS]
    DIMS_OF += [(case, 256, 2) for case in BY_CHANNELS]
    DIMS_OF += [(INT8, 64, 71)]  # the query heads of a model with one KV head
PADDED_DIMS = [72, 80, 96, 112, 192]
PADDED_CASES = [TURBO, INT8, KIVI, ("sinkq", {"residual_length": 0, "sink_num": 2}), ("turboquant", {})]
DIMS_OF += [(case, dim, 2) for case, dim in product(PADDED_CASES, PADDED_DIMS)]


@pytest.mark.parametrize(("case", "dim", "group"), DIMS_OF, ids=lambda x: str(x) if isinstance(x, int) else case_id(x))
def test_head_dims_and_groups(case: Case, dim: int, group: int):
    check_prompt_and_step(case, dim, group)


def check_prompt_and_step(case: Case, dim: int, group: int) -> None:
    """Compare a prompt, a step and the state after them with the reference. `group`: query heads of a KV head."""
    qkv = inputs(1, 66, 2 if case[1].get("bits") == "mixed" else 1, group, dim)
    one, other = make_layer(case, 128, qkv[1].shape[1]), make_layer(case, 128, qkv[1].shape[1])
    if reason := unsupported(one.spec, 1, dim, dim):
        pytest.skip(reason)
    want = feed(reference_step, one, qkv, [65, 66])
    got = feed(fused_step, other, qkv, [65, 66])
    assert differing(one, other) == []
    assert max(map(error, got, want)) < ROUNDING


@pytest.mark.parametrize(
    "scores", [{"softcap": 5.0}, {"window": 40}, {"sinks": (0.5, 2.0)}], ids=["softcap", "window", "sinks"]
)
@pytest.mark.parametrize("case", [TURBO, NONE], ids=case_id)
def test_softcap_window_and_sinks(case: Case, scores: dict):
    qkv = inputs(1, 130)
    if "sinks" in scores:
        scores = {"sinks": torch.tensor(scores["sinks"], device=DEVICE)}
    asked = Scores(0.3, **scores)
    cuts = [128, 129, 130]
    want = feed(reference_step, make_layer(case, 256), qkv, cuts, scores=asked)
    got = feed(fused_step, make_layer(case, 256), qkv, cuts, scores=asked)
    assert max(map(error, got, want)) < (0.04 if case[0] == "turbo" else 1e-5)


def dequantize(layer: QAttnLayer, tokens: int) -> list[torch.Tensor]:
    """fp64 keys and values of a layer's first row as its codes say: blocks dequantized, open tokens from the ring,
    sinks from their table."""
    found = []
    for side, fmt in (("k", layer.spec.k), ("v", layer.spec.v)):
        state = side_of(layer.state, side)
        x = fmt.read(state, layer.blocks).dequantize().flatten(2, 3).double()[:, :, :tokens].clone()
        if fmt.windowed:
            ring, start = fmt.ring(state).dequantize().double(), int(layer.state["open_start"][0])
            index = torch.arange(start, tokens, device=DEVICE)
            x[:, :, start:] = ring[:, :, index % ring.shape[2]]
        if layer.spec.sink_pool.num:
            table = side_of(layer.state, "sink")
            batch, head, entry = torch.where((table["born"] > 0) & (table["written"] == 0))
            x[batch, head, table["slot"][batch, head, entry].long()] = (
                read_sinks(state, fmt).dequantize()[batch, head, entry].double()
            )
        found.append(x)
    return found


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """fp64 attention of one query over all keys."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    return ((q.double() @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def check_errors(case: Case, kind: str, tokens: int, dim: int = 128 if ON_GPU else 64, group: int = 4) -> None:
    """Check the error against fp64 attention over the dequantized format: at most 1.5 times the reference's error, or a
    quarter of the codes' error. The check uses many rows, because a few tokens may have small errors by chance."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    rows, heads = (1, 2 if tokens > 5000 else 16) if ON_GPU else (1, 1)
    full = inputs(rows, tokens, heads, group, dim, kind)
    q, k, v = (x.to(dtype) for x in full)
    one, other = make_layer(case, tokens + 64, heads), make_layer(case, tokens + 64, heads)
    for layer in (one, other):  # everything but the last token, if many without attending
        layer.lazy_initialization(k, v)
        if 1 < tokens <= SHORT_CALL + 1:
            step(fused_step, layer, (q, k, v), 0, tokens - 1)
        elif tokens > 1:
            past = slice(0, tokens - 1)
            span = torch.tensor([[0, tokens - 1]], dtype=torch.int32, device=DEVICE)
            turned = rotated(*(x[:, :, past] for x in (q, k, v)), layer.spec.compute, layer.state, partial(map, rotate))
            call = make_call(Step(*turned, span, layer, Scores(1.0)))
            write_long(call, 0)
            finish(call)
    want = step(reference_step, one, (q, k, v), tokens - 1, tokens)[0]
    got = step(fused_step, other, (q, k, v), tokens - 1, tokens)[0]
    held = dequantize(one, tokens)
    turned = next(rotated(q, k, v, one.spec.compute, one.state, partial(map, rotate)))
    mine, full_precision = exact(turned[:, :, -1:], *held), exact(q[:, :, -1:], k, v)
    mine = mine if one.spec.compute.rotate_v == "none" else rotate_back(mine)
    own, codes = error(want, mine), error(mine, full_precision)
    resolution = torch.finfo(dtype).eps * (0.25 if ON_GPU else 2)  # of bf16 outputs; of fp32 sums in another order
    assert error(got, mine) <= max(1.5 * own, 0.25 * codes, resolution)


LENGTHS = [1, 2, 31, 63, 64, 65, 129]
if ON_GPU:
    POINTS = [(case, kind, n) for case in FORMATS for kind in ("normal", "peaked", "outlier") for n in (*LENGTHS, 4096)]
else:  # every length with and without open tokens, every format over open tokens alone, and after two blocks
    POINTS = [(case, "normal", n) for case in (TURBO, INT8) for n in LENGTHS]
    POINTS += [(case, *point) for case in FORMATS for point in (("outlier", 31), ("peaked", 129))]


@pytest.mark.parametrize(
    ("case", "kind", "tokens"), POINTS, ids=lambda x: case_id(x) if isinstance(x, tuple) else str(x)
)
def test_error_against_fp64(case: Case, kind: str, tokens: int):
    check_errors(case, kind, tokens)


@needs_gpu
@pytest.mark.parametrize("kind", ["normal", "peaked", "outlier"])
@pytest.mark.parametrize("case", [*CASES, TWO_BITS, *LONG], ids=case_id)
def test_error_at_32k(case: Case, kind: str):
    check_errors(case, kind, 32768)


@pytest.mark.parametrize("case", [TURBO, INT8, KIVI], ids=case_id)
def test_unused_blocks_are_never_read(case: Case):
    qkv = inputs(1, 70, heads=1)
    clean, dirty = make_layer(case, 256, 1), make_layer(case, 256, 1)
    feed(fused_step, clean, qkv, [66])
    feed(fused_step, dirty, qkv, [66])
    spoil(dirty, 2)
    got, want = (step(fused_step, layer, qkv, 66, 70)[0] for layer in (dirty, clean))
    assert torch.equal(got, want)


@needs_gpu
def test_capacity_does_not_change_results():
    qkv = inputs(2, 300, group=4, dim=128)
    results = [feed(fused_step, make_layer(("turbo", {}), capacity), qkv, [299, 300])[1] for capacity in (320, 8192)]
    assert torch.equal(*results)


@needs_gpu
@pytest.mark.parametrize(
    "case", [("sinkq", {"group_size": 64, "sink_window": 2}), ("turbo", {"sink_num": 3})], ids=case_id
)
def test_sinks_come_and_go_over_a_long_text(case: Case):
    """Places of the table are taken, left and taken again; in chunks and in single steps, of several rows."""
    qkv = inputs(8, 1500, heads=4, group=2)
    one, other = make_layer(case, 1536, 4), make_layer(case, 1536, 4)
    cuts = [*range(61, 1400, 61), *range(1400, 1501)]
    want = feed(reference_step, one, qkv, cuts)
    got = feed(fused_step, other, qkv, cuts)
    assert differing(one, other) == []
    assert max(map(error, got, want)) < ROUNDING


@needs_gpu
@pytest.mark.large_memory
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_offsets_beyond_two_to_the_31(case: Case):
    """The second row starts after more elements than 32 bits can count."""
    qkv = inputs(2, 200, heads=2, group=2, dim=128)
    near = make_layer(case, 256)
    if near.spec.k.name == "model":
        pytest.skip("model precision would take 64 GB")
    near.lazy_initialization(qkv[1], qkv[2])
    grows = [name for name, spec in near.tensor_specs().items() if spec.block_dim is not None]
    a_token = max(near.state[name][0].numel() for name in grows) // near.capacity
    far = make_layer(case, 2**31 // a_token + 4096)
    far.lazy_initialization(qkv[1], qkv[2])
    assert max(far.state[name][0].numel() for name in grows) > 2**31
    start = 0
    for end in (100, 130, 131, 199, 200):
        got, want = (
            fused_step(*(x[:, :, start:end] for x in qkv), torch.tensor([[0, end - start]], dtype=torch.int32).cuda(),
                       layer.state, layer.spec, Scores(128**-0.5), 4)[0]
            for layer in (far, near)
        )  # fmt: skip
        assert torch.equal(got, want)
        start = end
    assert torch.equal(far.state["length"], near.state["length"])


@triton.jit
def _open_rows(X, CODES):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    code, _ = quantize_fp8(tl.load(X + at))
    tl.store(CODES + at, code)


def test_fp8_rounds_as_torch_does():
    """Over all its range: ties, and the small numbers that lie evenly apart."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=g) * 2.0 ** torch.randint(-14, 7, (64, 64), generator=g)
    x[:16] = torch.arange(1024).view(16, 64) * 2.0**-12  # half and quarter steps below 2^-6 and above
    x[16:32] = (torch.arange(1024).view(16, 64) - 512) * 0.5
    x = x.clamp(-448, 448)
    x[:, 0] = 448.0  # scale 1
    codes = torch.empty(64, 64, device=DEVICE)
    _open_rows[(1,)](x.to(DEVICE), codes, enable_fp_fusion=False)
    assert torch.equal(codes.cpu(), fp8_tokens(x).x.float())
