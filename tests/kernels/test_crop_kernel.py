"""The kernels that take tokens back against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, case_id
from kernel_cases import FORMATS

from qattn_hf.methods import get_method
from qattn_kernels.layer.arena import Layout, empty_arena, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry
from qattn_kernels.ops.crop import launch, reference
from qattn_kernels.step.reference import reference_step

pytestmark = pytest.mark.gpu
POOLLESS = [case for case in FORMATS if not case[1].get("sink_num")]


def filled(spec: LayerSpec, layout: Layout, lengths: list[int]) -> torch.Tensor:
    """The arena of two rows, the first of which has padding in its first call, after calls of so many tokens."""
    arena, torch_rng = empty_arena(layout, torch.device(DEVICE)), torch.Generator().manual_seed(0)
    state = views(arena, layout)
    for i, tokens in enumerate(lengths):
        q, k, v = (torch.randn(2, 2, tokens, 64, generator=torch_rng).to(DEVICE) for _ in range(3))
        k[0, 0, -1, 0] = float("inf") if i else 1.0  # whose bit is set
        first = 9 if i == 0 else 0
        span = torch.tensor([[first, tokens - first], [0, tokens]], dtype=torch.int32, device=DEVICE)
        reference_step(q, k, v, span, state, spec, Scores(0.125))
    return arena


@pytest.mark.parametrize("drops", [[1], [5, 3, 70], [130], [200, 9], [300]], ids=str)
@pytest.mark.parametrize("case", POOLLESS, ids=case_id)
def test_tokens_are_taken_back_as_in_the_reference(case: Case, drops: list[int]):
    """Within the horizon, beyond it, some of it behind a crop before, and all of a row."""
    spec = get_method(case[0])(**case[1]).last_layer_spec(2)
    layout = Layout(Geometry(2, 2, 64, 64, -(-512 // spec.window.block), torch.float32), spec)
    arena = filled(spec, layout, [270, 3, 1, 20])
    want = arena.clone()
    in_kernels = LayerSpec(**{**vars(spec), "impl": "triton"})
    for drop in drops:
        reference.crop(views(want, layout), spec, drop)
        launch.crop(views(arena, layout), in_kernels, drop, arena, layout.encode())
        for name in layer_tensors(*layout):
            assert torch.equal(views(arena, layout)[name], views(want, layout)[name]), (name, drop)
