"""Steps that Python does not see, compiled or replayed, followed by all other uses of the cache.

The host's count of tokens must not be trusted. Both the reference and kernels run; the interpreter treats short calls
as such steps.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer
from kernel_cases import CASES
from test_fused_kernels import inputs

from qattn_hf import CapacityError
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.scores import Scores

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
ON_GPU = DEVICE == "cuda"
# The interpreter is slow: there one case of each method for the reference, and of each kind of window (none, a block,
# a residual, a pool) for kernels, whose formats take no part in counting; long compiled calls, one row and head.
STEP, ROWS, HEADS = (1, 2, 2) if ON_GPU else (32, 1, 1)
SOME = CASES if ON_GPU else list({case[0]: case for case in reversed(CASES)}.values())
WINDOWS = ("int8", "turbo", "kivi", "sinkq")
BOTH = [(case, impl) for case in SOME for impl in ("reference", "triton")]
BOTH = [(case, impl) for case, impl in BOTH if ON_GPU or impl == "reference" or case[0] in WINDOWS]
HIDDEN = int(os.environ.get("COMPILED_STEPS", "128"))  # in a row; fewer where each takes long, as under memcheck
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(layer: QAttnLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    return layer.attend(q, layer.update(k, v)[0], span, Scores(q.shape[-1] ** -0.5))[0]


class Fed:
    """A layer and how far into a text it is; `hidden` calls are compiled."""

    def __init__(self, case: Case, impl: str, hides: bool, max_cache_len: int | None = 1024):
        layer = make_layer(case, max_cache_len, HEADS)
        self.layer = QAttnLayer(replace(layer.spec, impl=impl), max_cache_len)
        self.qkv, self.at = inputs(ROWS, 800, HEADS), 0
        torch._dynamo.reset()
        self.compiled = torch.compile(run, fullgraph=True, backend="aot_eager") if hides else run

    def call(self, tokens: int, how: Callable[..., torch.Tensor] = run) -> torch.Tensor:
        q, k, v = (x[:, :, self.at : self.at + tokens] for x in self.qkv)
        self.at += tokens
        return how(self.layer, q, k, v, torch.tensor([[0, tokens]] * ROWS, dtype=torch.int32, device=DEVICE))

    def hidden(self, tokens: int) -> torch.Tensor:
        return torch.cat([self.call(STEP, self.compiled) for _ in range(tokens // STEP)], 2)

    def crop(self, tokens: int) -> None:
        self.layer.crop(-tokens)
        self.at -= tokens

    def saved(self) -> None:
        """A copy that went through a file goes on in its place."""
        self.layer = pickle.loads(pickle.dumps(copy.deepcopy(self.layer)))


THEN: list[Callable[[Fed], Any]] = [
    lambda fed: fed.call(40),
    lambda fed: fed.call(20),
    lambda fed: (fed.crop(30), fed.call(40))[1],
    lambda fed: (fed.layer.plan(700), fed.call(1))[1],
    lambda fed: (fed.saved(), fed.call(40))[1],
]


@pytest.mark.parametrize(("case", "impl"), BOTH, ids=lambda x: x if isinstance(x, str) else case_id(x))
def test_whatever_follows_is_as_after_eager_steps(case: Case, impl: str):
    fed, eager = Fed(case, impl, hides=True), Fed(case, impl, hides=False)
    for one in (fed, eager):
        one.call(8)
    for then in THEN if ON_GPU or impl == "reference" else THEN[:1]:  # the others differ on the host alone
        for one in (fed, eager):
            one.hidden(HIDDEN if ON_GPU or impl == "reference" else 96)
        assert torch.equal(then(fed), then(eager))
        assert all(torch.equal(tensor, eager.layer.state[name]) for name, tensor in fed.layer.state.items())
        assert fed.layer._used == eager.layer._used == fed.at


@pytest.mark.parametrize(
    ("case", "impl"),
    [(case, impl) for case in (("int8", {}), ("turbo", {})) for impl in ("reference", "triton")][: 4 if ON_GPU else 3],
    ids=lambda x: x if isinstance(x, str) else case_id(x),
)
def test_a_cache_that_grows_does_so_after_compiled_steps(case: Case, impl: str):
    fed, eager = Fed(case, impl, True, None), Fed(case, impl, False, None)
    for one in (fed, eager):
        one.call(30)
        one.layer.plan(128)
        one.hidden(96)
    assert torch.equal(fed.call(20), eager.call(20))
    assert fed.layer.capacity == eager.layer.capacity == 192


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU: on a CPU the operator asks for lengths, and refuses")
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_steps_past_the_capacity_are_found_out(case: Case, impl: str):
    """What a compiled step cannot write is not written anywhere, and the next call that Python sees says so."""
    fed = Fed(case, impl, hides=True, max_cache_len=128)
    fed.call(100)
    fed.hidden(28)
    full = {name: tensor.clone() for name, tensor in fed.layer.state.items()}
    fed.hidden(5)
    moved = {name for name, tensor in fed.layer.state.items() if not torch.equal(tensor, full[name])}
    assert moved <= {"columns_seen", "padded", "overflow"} | {name for name in moved if name.startswith("v_")}
    assert fed.layer.state["overflow"].tolist() == [5, 5]
    for call in (lambda: fed.call(1), lambda: fed.call(40), lambda: fed.layer.plan(10)):
        with pytest.raises(CapacityError, match=r"5 are lost.*larger max_cache_len"):
            call()
    fed.layer.reset()
    fed.at = 0
    fed.call(100)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_users_own_graph_is_not_counted_either(case: Case):
    fed, eager = Fed(case, "triton", False), Fed(case, "triton", False)
    for one in (fed, eager):
        one.call(40)
        one.call(1)
    static = [x[:, :, :1].clone() for x in fed.qkv]
    span = torch.tensor([[0, 1]] * 2, dtype=torch.int32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(fed.layer, *static, span)
    for turn in range(2):
        for _ in range(90):
            for x, y in zip(static, fed.qkv, strict=True):
                x.copy_(y[:, :, fed.at : fed.at + 1])
            graph.replay()
            fed.at += 1
        want = torch.cat([eager.call(1) for _ in range(90)], 2)
        assert torch.equal(out, want[:, :, -1:])
        assert torch.equal(fed.call(40), eager.call(40)), turn
