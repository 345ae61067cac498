"""Calls of kernels that fail, at an allocation or at a launch: as `test_faults.py` asks of the reference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id, same_state, tiny_llama
from test_faults import CALLS, CASES, EVERY, fails_everywhere, fed, new
from torch.utils._python_dispatch import _disable_current_modes

from qattn_hf import UnsupportedError, patch
from qattn_kernels.launch import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_grad")]
ALL = EVERY or DEVICE == "cuda"
# What puts a call back is the same of all methods: the interpreter runs all kinds of calls for one of them, and closes
# blocks with a pool of sinks too.
PAIRS = [(call, case) for call in CALLS for case in CASES if ALL or case is CASES[0]]
PAIRS += [] if ALL else [("closes", case) for case in CASES if case[0] == "sinkq"]
INTERRUPTED = [pair for pair in PAIRS if pair[0] in ("first", "long", "short", "step")]
INTERRUPTED += [("planned", case) for case in CASES]
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="launches of compiled kernels cannot be made to fail")


def pair_id(value: Any) -> str:
    return value if isinstance(value, str) else case_id(value)


def model_of(case: Case) -> Any:
    sizes = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    return patch(tiny_llama(**sizes).to(DEVICE), case[0], impl="triton", **case[1])


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that is called before each launch of a kernel, and may raise; what it is computed of is one launch."""
    calls: list[Any] = []
    if DEVICE == "cpu":
        from triton.runtime.interpreter import GridExecutor

        interpret, pointer = GridExecutor.__call__, plan._at

        def launch(self: Any, *args: Any, **kwargs: Any) -> None:
            for call in calls:
                call()
            with _disable_current_modes():
                interpret(self, *args, **kwargs)

        def pointer_of(*args: Any) -> torch.Tensor:  # an address on a GPU, a tensor here
            with _disable_current_modes():
                return pointer(*args)

        monkeypatch.setattr(GridExecutor, "__call__", launch)
        monkeypatch.setattr(plan, "_at", pointer_of)
    return calls.append


@pytest.mark.slow
@pytest.mark.product("step-turbo")
@pytest.mark.parametrize(("call", "case"), PAIRS, ids=pair_id)
def test_a_call_that_fails_has_never_been(launching, call: str, case: Case):
    step, later = (1 if EVERY else 13, (1, 40)) if ALL else (47, (1,))
    fails_everywhere(model_of(case), call, torch.OutOfMemoryError, 3, step, later)


def interrupting(launching: Any) -> list[int]:
    """Return a counter of launches that are left. The launch that takes it to 0 is interrupted."""
    left = [0]

    def interrupt() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    launching(interrupt)
    return left


@pytest.mark.slow
@interpreted
@pytest.mark.product("step-turbo")
@pytest.mark.parametrize(("call", "case"), INTERRUPTED, ids=pair_id)
def test_an_interrupt_between_launches(launching, call: str, case: Case):
    """A step whose launches are planned has nothing kept for it: its cache is refused, in words."""
    model, left = model_of(case), interrupting(launching)
    cuts, tokens = ([70, 1], 1) if call == "planned" else CALLS[call]
    base, ids = fed(model, cuts), new(model, sum(cuts), tokens)
    want = model(ids, past_key_values=copy.deepcopy(base)).logits
    for launch in (1, 2, 3) if ALL else (2,):
        cache, left[0] = copy.deepcopy(base), launch
        with pytest.raises(KeyboardInterrupt):
            model(ids, past_key_values=cache)
        if call == "planned":
            with pytest.raises(UnsupportedError, match=r"interrupted.*cache\.reset\(\)"):
                model(ids, past_key_values=cache)
        else:
            assert torch.equal(model(ids, past_key_values=cache).logits, want)


EDITS: dict[str, Any] = {
    "crop": lambda cache: cache.crop(-9),
    "far": lambda cache: cache.crop(-68),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
}


@pytest.mark.slow
@interpreted
@pytest.mark.product("crop-turbo")
@pytest.mark.parametrize("case", [CASES[0], *(case for case in CASES if case[0] == "sinkq")], ids=case_id)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_is_interrupted_between_launches(launching, edit: str, case: Case):
    """The same edit again, and a step: right. A reorder keeps nothing, so its cache is refused."""
    model, left = model_of(case), interrupting(launching)
    base = fed(model, [70])
    twin, before = copy.deepcopy(base), left[0]
    EDITS[edit](twin)
    launches, ids = before - left[0], new(model, 70, 1)
    for launch in (2, launches) if ALL else (launches,):
        cache, left[0] = copy.deepcopy(base), launch
        with pytest.raises(KeyboardInterrupt):
            EDITS[edit](cache)
        if edit == "reorder":
            with pytest.raises(UnsupportedError, match=r"interrupted.*cache\.reset\(\)"):
                EDITS[edit](cache)
            continue
        EDITS[edit](cache)
        for layer, other in zip(cache.layers, twin.layers, strict=True):
            assert same_state(layer, other) == []
    if edit != "reorder":
        assert torch.equal(*(model(ids, past_key_values=x).logits for x in (cache, twin)))
