"""Launches by CUDA's driver: what it is given for a kernel's arguments, and when Triton launches instead."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import DEVICE, make_layer

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.chip import H200, as_chip
from qattn_kernels.launch import call, driver, plan
from qattn_kernels.launch.constants import sizes_of
from qattn_kernels.layer.scores import Scores

SIGNATURE = {"X": "*fp32", "strides": ("i32", "constexpr", "i64"), "scale": "fp32", "C": "constexpr", "Y": ("*i8",)}
SIZES = [8, 4, 8, 4, 8, 8, 8]  # bytes of what is no constant, and of two pointers to scratch memory
ARGUMENTS = (plan.Pointer(0, 64, torch.float32), (-3, 1, 1 << 40), 0.1, ("any", 7), (plan.Pointer(2, 5, torch.int8),))


class Library:
    """A driver that notes what it was asked to launch. `sizes`: of a kernel's parameters."""

    def __init__(self, sizes: list[int], code: int = 0):
        self.sizes, self.code, self.seen = sizes, code, []

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        if index >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: None) -> int:
        launched = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        made = config._obj
        grid = made.grid_x, made.grid_y, made.grid_z, made.block_x, made.block_y, made.block_z
        attributes = [(x.id, x.value) for x in made.attributes[: made.count]] if made.count else []
        self.seen.append((function.value, grid, made.shared, made.stream, attributes, launched))
        return self.code


def kernel(calls: list[Any], **metadata: int) -> Any:
    """A compiled kernel of Triton whose launcher notes its `calls`."""
    normal = dict(num_ctas=1, num_warps=4, shared=1024, launch_cooperative_grid=0, launch_pdl=0)
    scratch = dict(global_scratch_size=0, profile_scratch_size=0)

    class Kernel:
        src = SimpleNamespace(signature=SIGNATURE)
        function, packed_metadata = 77, (4, 1, 1024)
        metadata: Any = None

        def run(self, *arguments: Any) -> None:
            calls.append(arguments)

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, stream: calls.append((stream, *arguments))

    Kernel.metadata = SimpleNamespace(**{**normal, **scratch, **metadata})
    return Kernel()


def launched(monkeypatch: pytest.MonkeyPatch, library: Library | None, **metadata: int) -> list[Any]:
    """What Triton's launcher was given for a launch over an arena at 4096 and a tensor at 10,000, in stream 9."""
    monkeypatch.setattr(driver, "driver", lambda: library)
    calls: list[Any] = []
    one = plan.Launch(kernel(calls, **metadata), (5, 6, 1), ARGUMENTS, {})
    plan.Plan([one], [], 0)._launch([4096, 0, 10_000], 9)
    return calls


def test_the_driver_gets_every_argument_in_its_size(monkeypatch):
    library = Library(SIZES)
    assert launched(monkeypatch, library) == []
    ((function, grid, shared, stream, attributes, given),) = library.seen
    assert (function, grid, shared, stream, attributes) == (77, (5, 6, 1, 128, 1, 1), 1024, 9, [])
    x, row, column, scale, y, *scratch = given
    numbers = [int.from_bytes(place, "little", signed=True) for place in (x, row, column, y)]
    assert numbers == [4160, -3, 1 << 40, 10_005]
    assert ctypes.c_float.from_buffer_copy(scale).value == pytest.approx(0.1)
    assert scratch == [bytes(8)] * 2


def test_a_dependent_kernel_is_launched_as_one(monkeypatch):
    library = Library(SIZES)
    assert launched(monkeypatch, library, launch_pdl=1) == []
    ((*_, attributes, _),) = library.seen
    assert attributes == [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is allowed


@pytest.mark.parametrize(("library", "early"), [(Library(SIZES), True), (None, False)], ids=["12.4", "before"])
def test_kernels_start_early_only_if_graphs_can_hold_them(monkeypatch, library, early):
    monkeypatch.setattr(call, "driver", lambda: library)
    spec = make_layer(("turbo", {})).spec
    sizes = sizes_of(spec, 2, 2, 64, 1, False, False, False)._replace(PLAIN=False)
    with as_chip(H200):
        assert early == call._on_device(sizes, spec, torch.device("cuda"), True).DEPENDENT
        assert not call._on_device(sizes, spec, torch.device("cuda"), False).DEPENDENT  # prompts never are
    with as_chip(H200._replace(capability=(8, 9))):
        assert not call._on_device(sizes, spec, torch.device("cuda"), True).DEPENDENT


def test_addresses_that_changed_are_filled_in_and_others_stay(monkeypatch):
    library = Library(SIZES)
    monkeypatch.setattr(driver, "driver", lambda: library)
    made = plan.Plan([plan.Launch(kernel([]), (1, 1, 1), ARGUMENTS, {})] * 2, [], 0)

    def given(*addresses: int) -> list[int]:
        library.seen.clear()
        made._launch(list(addresses), 9)
        return [int.from_bytes(seen[-1][4], "little") for seen in library.seen]

    assert [given(4096, 0, x) for x in (1000, 1000, 2000)] == [[1005] * 2, [1005] * 2, [2005] * 2]
    assert given(8192, 0, 3000) == [3005] * 2 and given(4096, 0, 2000) == [2005] * 2
    second = made._bound[4096].launches[1].direct
    monkeypatch.setattr(type(second), "__call__", lambda self, stream: 1 // (self is not second))
    with pytest.raises(ZeroDivisionError):  # an interrupt between two launches leaves some addresses new
        given(4096, 0, 5000)
    monkeypatch.undo()
    monkeypatch.setattr(driver, "driver", lambda: library)
    assert given(4096, 0, 2000) == [2005] * 2


@pytest.mark.parametrize(
    ("library", "metadata"),
    [
        (None, {}),
        (Library(SIZES[:-1]), {}),
        (Library([*SIZES, 8]), {}),
        (Library([8, 4, 8, 8, 8, 8, 8]), {}),
        (Library(SIZES), {"num_ctas": 2}),
        (Library(SIZES), {"global_scratch_size": 64}),
        (Library(SIZES, code=201), {}),
    ],
    ids=["no driver", "a parameter less", "one more", "another size", "clusters", "scratch", "an error"],
)
def test_triton_launches_what_the_driver_cannot(monkeypatch, library, metadata):
    ((*lead, x, strides, scale, constant, y),) = launched(monkeypatch, library, **metadata)
    assert lead == [5, 6, 1, 9, 77, (4, 1, 1024), None, None, None]
    assert (x, strides, scale, constant, y) == (4160, (-3, 1, 1 << 40), 0.1, ("any", 7), (10_005,))


def test_profilers_see_launches(monkeypatch):
    library = Library(SIZES)
    monkeypatch.setattr(plan, "_watched", lambda: True)
    assert launched(monkeypatch, library) == [(9, 4160, (-3, 1, 1 << 40), 0.1, ("any", 7), (10_005,))]
    assert library.seen == []


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU: the interpreter has no driver")
def test_all_launches_of_steps_and_prompts_are_direct_in_any_thread(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    layer, results = QAttnLayer(replace(make_layer(("turbo", {})).spec, impl="triton"), 256), []
    device = torch.empty(0, device=DEVICE).device  # of this thread: another one begins with the first GPU

    def call(tokens: int) -> None:
        q, k, v = (torch.ones(1, heads, tokens, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
        span = torch.tensor([[0, tokens]], dtype=torch.int32, device=device)
        results.append(layer.attend(q, layer.update(k, v)[0], span, Scores(0.125))[0])

    call(40)
    layer.reset()
    for tokens in (40, 1, 1):
        call(tokens)
    thread = threading.Thread(target=call, args=(1,))
    thread.start()
    thread.join()
    bound = [one for made in plan._plans.values() if made for over in made._bound.values() for one in over.launches]
    assert len(results) == 5 and bound and all(one.direct is not None for one in bound)
