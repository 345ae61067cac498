"""The kernels that take tokens back against the reference, byte for byte."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id
from kernel_cases import FORMATS

from qattn_hf.methods import get_method
from qattn_kernels.formats.base import FixedBy
from qattn_kernels.launch.launches import recorded
from qattn_kernels.layer.arena import Layout, empty_arena, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry, State
from qattn_kernels.ops.crop import launch, reference
from qattn_kernels.step.reference import reference_step

pytestmark = pytest.mark.gpu
ALL = {"residual_length": 0, "sink_skip_layers": 0}
POOLS: list[Case] = [
    ("sinkq", {"group_size": 32, "sink_num": 3, "sink_window": 0, **ALL}),
    ("sinkq", {"group_size": 32, "sink_num": 3, "sink_window": 2, **ALL}),
    ("sinkq", {"group_size": 32, "sink_num": 3, "sink_window": 32, **ALL, "residual_length": 20}),
    ("sinkq", {"group_size": 64, "sink_num": 1, "sink_window": 2, **ALL, "crop_horizon": 128}),
    ("turbo", {"sink_num": 2, "sink_window": 1}),
    ("turbo", {"bits": "mixed", "sink_num": 3}),
]
by_reference = reference.crop


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer of the kernels may be sent to the reference, whatever is taken back."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a layer of the kernels was sent to the reference")

    monkeypatch.setattr(reference, "crop", refuse)


class Pair:
    """Two equal arenas: kernels crop one, the reference the other.

    The first of two rows has padding in its first call. Keys become smaller over time, so that each block brings sinks.
    """

    def __init__(self, case: Case, lengths: list[int]):
        self.spec = get_method(case[0])(**case[1]).last_layer_spec(2)
        geometry = Geometry(2, 2, 64, 64, -(-512 // self.spec.window.block), torch.float32)
        self.layout = Layout(geometry, self.spec)
        self.in_kernels = LayerSpec(**{**vars(self.spec), "impl": "triton"})
        self.want = empty_arena(self.layout, torch.device(DEVICE))
        self.torch_rng, self.columns = torch.Generator().manual_seed(0), 0
        for i, tokens in enumerate(lengths):
            self._append(tokens, first=0 if i else 9)
        self.arena = self.want.clone()

    @property
    def state(self) -> State:
        return views(self.arena, self.layout)

    def _append(self, tokens: int, first: int = 0) -> None:
        q, k, v = (torch.randn(2, 2, tokens, 64, generator=self.torch_rng).to(DEVICE) for _ in range(3))
        self.columns += tokens
        k /= torch.linspace(1 + (self.columns - tokens) / 8, 1 + self.columns / 8, tokens, device=DEVICE)[:, None]
        k[0, 0, -1, 0] = 1.0 if first else float("inf")  # whose bit is set
        span = torch.tensor([[first, tokens - first], [0, tokens]], dtype=torch.int32, device=DEVICE)
        reference_step(q, k, v, span, views(self.want, self.layout), self.spec, Scores(0.125))

    def append(self, tokens: int) -> None:
        """The same new tokens for both, which hold the same bytes."""
        self._append(tokens)
        self.arena.copy_(self.want)

    def crop(self, drop: int) -> None:
        """Take `drop` tokens back from both; they must hold the same bytes after it."""
        by_reference(views(self.want, self.layout), self.spec, drop)
        launch.crop(self.state, self.in_kernels, drop, self.arena, self.layout.encode())
        want = views(self.want, self.layout)
        assert [name for name in layer_tensors(*self.layout) if not torch.equal(self.state[name], want[name])] == []
        assert torch.equal(self.arena, self.want)


@pytest.mark.parametrize("drops", [[1], [5, 3, 70], [130], [200, 9], [250], [300]], ids=str)
@pytest.mark.parametrize("case", [*FORMATS, *POOLS], ids=case_id)
def test_tokens_are_taken_back_as_in_the_reference(case: Case, drops: list[int]):
    """Crops within the horizon, beyond it, partly past an earlier crop, and of a whole row."""
    pair = Pair(case, [270, 3, 1, 20])
    for drop in drops:
        pair.crop(drop)


@pytest.mark.slow
@pytest.mark.parametrize("case", POOLS, ids=case_id)
def test_a_pool_is_rolled_back_by_any_number_of_tokens_within_the_horizon(case: Case):
    """Up to two blocks reopen: their sinks go, and what they pushed out of the pool or its window is back."""
    pair = Pair(case, [460, 3, 1, 20])
    full, reopened, returned = pair.arena.clone(), set(), dict.fromkeys(("evicted", "written"), 0)
    before = views(full, pair.layout)
    for drop in range(1, pair.spec.window.horizon + 1):
        pair.arena.copy_(full)
        pair.want.copy_(full)
        pair.crop(drop)
        reopened |= set((before["closed"] - pair.state["closed"]).tolist())
        for name in returned:
            there = (before[f"sink.{name}"] > 0) & (pair.state["sink.born"] > 0)
            returned[name] += int((there & (pair.state[f"sink.{name}"] == 0)).sum())
    assert {1, 2} <= reopened or pair.spec.window.horizon <= pair.spec.window.block
    assert all(returned.values()), "something must leave the pool and its window for this to be a test"


@pytest.mark.parametrize("case", POOLS, ids=case_id)
def test_a_pool_survives_crops_with_tokens_between(case: Case):
    """Drafts that are rejected repeatedly, some beyond the horizon, with other tokens written in between."""
    pair = Pair(case, [150, 20])
    for drop, tokens in ((4, 5), (30, 33), (64, 70), (9, 1), (1, 2), (64, 1), (130, 60), (5, 64), (20, 32)):
        pair.crop(drop)
        pair.append(tokens)


def one_block(case: Case) -> int:
    """Return enough tokens for the row without padding to close its first blocks.

    The padded row closes its own with the next nine.
    """
    window = get_method(case[0])(**case[1]).last_layer_spec(2).window
    return window.span + window.residual + 8


@pytest.mark.parametrize("case", FORMATS, ids=case_id)
def test_what_the_first_block_fixed_goes_with_it(case: Case):
    """The only block reopens: what formats name as fixed is zeros again."""
    pair = Pair(case, [one_block(case), 9])
    fixed = [f"{side}.{name}" for side in ("k", "v") for name in getattr(pair.spec, side).fixed]
    assert all(pair.state[name].any() for name in fixed)
    pair.crop(18)
    assert not pair.state["closed"].any() and not any(pair.state[name].any() for name in fixed)


def test_formats_say_what_is_fixed_by_tokens(monkeypatch: pytest.MonkeyPatch):
    """Kernels unset it as the reference does: where fewer tokens are left than a block has, however many are closed."""
    pair = Pair(("turbo", {}), [270])
    monkeypatch.setattr(type(pair.spec.k), "fixed", {"head_of": FixedBy.TOKENS})
    pair.crop(215)
    assert (pair.state["closed"] > 0).tolist() == [True, True]
    assert pair.state["k.head_of"].any(-1).tolist() == [False, False]
    assert pair.state["v.head_of"].any(-1).tolist() == [False, False]


@pytest.mark.parametrize("case", [("turbo", {}), ("int8", {}), *POOLS[1:2]], ids=case_id)
def test_nothing_but_kernels_runs(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Two launches, three with a pool, and no operation of PyTorch, which might wait for the device."""
    pair, computed = Pair(case, [100]), []
    monkeypatch.setattr(launch, "planned", lambda key, inputs, compute: computed.append(compute))
    crop = partial(launch.crop, pair.state, pair.in_kernels, 3, pair.arena, pair.layout.encode())
    beside, inside = recorded(crop)[1], recorded(computed[0])[1]
    assert beside.foreign is inside.foreign is None and not beside.allocated and not inside.allocated
    # a compiled kernel has its name as `name`, one that is interpreted as a function has
    names = [getattr(one.kernel, "name", None) or one.kernel.__name__ for one in inside.launches]
    assert names == ["crop_kernel", "clear_kernel", *(["sinks_kernel"] if pair.spec.sink_pool.num else [])]
