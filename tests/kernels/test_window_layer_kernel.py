"""A packed layer with a sliding window in Triton: the codes of the reference bit for bit, and its output."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, case_id

from qattn_hf.layer.window_layer import WindowLayer
from qattn_hf.methods import get_method
from qattn_hf.model.layer_kinds import WindowLayerSpec
from qattn_kernels.layer.scores import Scores

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
WINDOW, HORIZON = 21, 32  # a capacity of 384 tokens for blocks of 64; a chunk begins at 63, the last slot of a tile
ROUNDING = 0.04  # kernels and reference round queries and weights to 8 bits, each in its own way
# tokens of calls: a prompt, a step, a prompt beyond the room, steps past the capacity, a later prompt
CALLS = (70, 1, 330, 20, 3, 100)
METHODS: list[Case] = [
    ("none", {}),
    ("turbo", {}),
    ("turbo", {"bits": "mixed"}),
    ("kivi", {"group_size": 64, "residual_length": 64}),
    ("turboquant", {}),
]
METHODS += [("int8", {}), ("turbo", {"sparse_v_tau": 0.01}), ("sage2", {})] if DEVICE == "cuda" else []


def layer(case: Case, impl: str, chunked: bool) -> WindowLayer:
    settings = get_method(case[0])(**case[1], crop_horizon=HORIZON)
    spec = settings.without_default_pool(settings.last_layer_spec(2))  # as a window has it
    return WindowLayer(WindowLayerSpec(**(vars(spec) | {"impl": impl}), sliding_window=WINDOW, chunked=chunked))


# the interpreter shows chunks in floating point and in INT8
CHUNKS = [case for case in METHODS if DEVICE == "cuda" or case in (("none", {}), ("turbo", {}))]


@pytest.mark.slow
@pytest.mark.product("none-window")  # half of what others take
@pytest.mark.parametrize(
    ("case", "chunked"),
    [
        *(pytest.param(case, False, id=f"{case_id(case)}-window") for case in METHODS),
        *(pytest.param(case, True, id=f"{case_id(case)}-chunks") for case in CHUNKS),
    ],
)
def test_kernels_are_the_reference(case: Case, chunked: bool):
    """With learned sinks and capped scores."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(CALLS)
    q, k, v = (torch.randn(1, 2, tokens, 64, generator=g).to(DEVICE) for _ in range(3))
    scores = Scores(0.125, softcap=20.0, sinks=torch.tensor([0.3, -1.0], device=DEVICE))
    kernels, reference, start = layer(case, "triton", chunked), layer(case, "reference", chunked), 0
    for count in CALLS:
        padding = 7 if start == 0 else 0
        span = torch.tensor([[padding, count - padding]], dtype=torch.int32, device=DEVICE)
        part = slice(start, start + count)
        out, want = (
            each.attend(q[:, :, part], each.update(k[:, :, part], v[:, :, part])[0], span, scores)[0]
            for each in (kernels, reference)
        )
        assert (out.double() - want.double()).norm() < ROUNDING * want.double().norm()
        start += count
    counters = ("v_read", "v_skipped", "v_queries", "v_dropped", "v_worst")  # kernels skip fewer (`Sparsity`)
    differing = [name for name, x in kernels.state.items() if not torch.equal(x, reference.state[name])]
    assert [name for name in differing if name not in counters] == []
    assert kernels.blocks == kernels.most and (kernels.state["block_pos"][:, 0] > 0).all()
