"""A packed layer with a sliding window: what it gives and holds is what an unbounded one has of the same tokens."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import FIXED, Case, case_id, cases, constants_of, feed, make_layer, random_qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn_hf import CapacityError, UnsupportedError
from qattn_hf.layer import changes
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.window_layer import WindowLayer
from qattn_hf.methods import get_method
from qattn_hf.model.layer_kinds import WindowLayerSpec
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL
from qattn_kernels.reference.operands import fp8_values

pytestmark = pytest.mark.usefixtures("no_grad")
CLOSE = {"rtol": 0, "atol": 2e-5}  # fp32 sums over fewer masked tiles; a code is 1e-2
BARE: Case = ("turbo", {"sink_num": 0})  # as in turbo's windows, which drop their sinks
WITHOUT_SINKS = [
    case
    for case in [BARE, *cases(), *FIXED]
    if get_method(case[0])(**case[1]).last_layer_spec(2).sink_pool.num == 0 and "memory" not in case[1]
]


def windowed(case: Case, window: int, max_cache_len: int | None = None, impl: str = "reference") -> WindowLayer:
    """Of chunks of `-window` tokens, where that is what `window` is."""
    spec = replace(get_method(case[0])(**case[1]).last_layer_spec(2), impl=impl)
    layer = WindowLayer(WindowLayerSpec(**vars(spec), sliding_window=abs(window), chunked=window < 0), max_cache_len)
    layer.constants = constants_of(spec)
    return layer


def call(layer: QAttnLayer, qkv: Any, start: int, end: int, window: int, padding: int = 0) -> torch.Tensor:
    q, k, v = (x[:, :, start:end] for x in qkv)
    span = torch.tensor([[0, end - start]] * len(q), dtype=torch.int32)
    span[0] += torch.tensor([padding, -padding], dtype=torch.int32)
    return layer.attend(q, layer.update(k, v)[0], span, Scores(q.shape[-1] ** -0.5, window=window))[0]


def differing(layer: WindowLayer, unbounded: QAttnLayer) -> list[str]:
    """Names of the tensors whose blocks are not the last ones of an unbounded layer, bit for bit."""
    found = set()
    for row, (held, closed) in enumerate(zip(layer.state["closed"], unbounded.state["closed"], strict=True)):
        for name, spec in layer.tensor_specs().items():
            if spec.block_dim is None:
                continue
            mine, theirs = layer.state[name][row], unbounded.state[name][row]
            got = mine.narrow(spec.block_dim - 1, 0, held)
            want = theirs.narrow(spec.block_dim - 1, closed - held, held)
            if not torch.equal(got, want):
                found.add(name)
    return sorted(found)


def windowed_attention(qkv: Any, window: int) -> torch.Tensor:
    q, k, v = (x.double() for x in qkv)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    tokens = torch.arange(q.shape[2])
    back, chunk = tokens[:, None] - tokens, tokens // abs(window)
    hidden = back >= window if window > 0 else chunk[:, None] != chunk
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill((back < 0) | hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200, -1, -64, -70, -200])
def test_against_attention_over_the_whole_history(window):
    qkv, layer = random_qkv(2, 900), windowed(("none", {}), window)
    cut, start, out = random.Random(window), 0, []
    while start < 900:
        end = min(900, start + cut.choice([1, 7, 32, 33, 90, 250]))
        out.append(call(layer, qkv, start, end, window))
        start = end
    torch.testing.assert_close(torch.cat(out, 2).double(), windowed_attention(qkv, window), **CLOSE)
    assert layer.blocks == layer.most < 900 // 64 and (layer.state["block_pos"][:, 0] > 0).all()


@pytest.mark.parametrize("case", WITHOUT_SINKS, ids=case_id)
@pytest.mark.product("turbo-sink_num=0")
def test_methods_hold_the_codes_of_an_unbounded_layer(case):
    """However the tokens come, with padding, and where a row's first block fixed scales, means or widths of heads."""
    window, qkv = 70, random_qkv(2, 1100)
    layer, unbounded = windowed(case, window), make_layer(case, None)
    exact, start = windowed_attention(qkv, window), 0
    for tokens in (150, 1, 1, 32, 300, *[16] * 12, 33, 100, 5, *[32] * 8):
        padding = 13 if start == 0 else 0
        out, want = (call(x, qkv, start, start + tokens, window, padding) for x in (layer, unbounded))
        if tokens > SHORT_CALL and (layer.spec.compute.smooth_k or fp8_values(layer.spec.compute)):
            # means and scales are of all that a layer holds, so that both round, each in its own way
            right = exact[:, :, start : start + tokens]
            assert (out - right).norm() < 1.2 * (want - right).norm()
        else:
            torch.testing.assert_close(out, want, **CLOSE)
        start += tokens
    assert differing(layer, unbounded) == []
    assert layer.blocks <= layer.most and (layer.state["closed"] < unbounded.state["closed"]).all()


@pytest.mark.parametrize("case", WITHOUT_SINKS, ids=case_id)
@pytest.mark.product("turbo-bits=mixed-smooth_k=True")
def test_a_first_call_without_padding_does_not_wait_for_the_device(case, monkeypatch):
    """The host knows which blocks to drop, and the layer equals one that asks the device."""
    for window, tokens in ((1, 575), (64, 576), (200, 640), (-70, 897)):
        qkv, scores = random_qkv(2, tokens + 40), Scores(0.125, window=window)
        layer, asks = windowed(case, window), windowed(case, window)
        call(layer, qkv, 0, 300, window, padding=7)  # of other rows, which are gone then
        layer.reset()
        q, k, v = (x[:, :, :tokens] for x in qkv)
        span = torch.tensor([[0, tokens]] * 2, dtype=torch.int32)
        with monkeypatch.context() as watched:
            watched.setattr(WindowLayer, "_slots_used", lambda self: pytest.fail("the host waited"))
            out = layer.attend(q, layer.update(k, v)[0], span, scores, unpadded=True)[0]
        assert torch.equal(out, asks.attend(q, asks.update(k, v)[0], span, scores)[0])
        assert layer._used == asks._used == asks._slots_used()
        for start, end in ((tokens, tokens + 1), (tokens + 1, tokens + 40)):
            assert torch.equal(*(call(x, qkv, start, end, window) for x in (layer, asks)))
        for name, state in asks.state.items():
            assert torch.equal(layer.state[name], state), name


def _crop(layer: QAttnLayer, unbounded: QAttnLayer, tokens: int) -> None:
    tokens = min(tokens, int(layer.get_seq_length()))
    try:
        layer.check_crop(tokens)
    except UnsupportedError:
        assert tokens > layer.spec.window.horizon  # within it nothing is refused
        return
    for each in (layer, unbounded):
        each.crop(-tokens)


def _rows(name: str, argument: Any) -> Callable[[QAttnLayer, QAttnLayer], None]:
    def change(*layers: QAttnLayer) -> None:
        for layer in layers:
            getattr(layer, name)(argument)

    return change


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "reorder": _rows("reorder_cache", torch.tensor([1, 0])),
    "repeat and select": lambda *layers: (
        _rows("batch_repeat_interleave", 2)(*layers),
        _rows("batch_select_indices", [1, 2])(*layers),
    ),
}
COPIES: dict[str, Callable[[QAttnLayer], QAttnLayer]] = {
    "copy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    case=st.sampled_from([BARE, ("int8", {}), ("none", {}), ("kivi", {})]),
    window=st.sampled_from([1, 20, 65, 130]),
    history=st.lists(
        st.one_of(
            st.integers(1, 200),
            st.tuples(st.just("crop"), st.integers(1, 150)),
            st.sampled_from([*CHANGES, *COPIES]),
        ),
        min_size=8,
        max_size=16,
    ),
)
def test_any_history_gives_what_an_unbounded_layer_gives(case, window, history):
    with torch.no_grad():
        qkv = random_qkv(2, 3300)
        layer, unbounded, start = windowed(case, window), make_layer(case, None), 0
        for step in [200, 150, *history, 40, 1]:
            if isinstance(step, int):
                out, want = (call(x, qkv, start, start + step, window) for x in (layer, unbounded))
                torch.testing.assert_close(out, want, **CLOSE)
                start += step
            elif isinstance(step, tuple):
                _crop(layer, unbounded, step[1])
            elif step in CHANGES:
                CHANGES[step](layer, unbounded)
            else:
                layer = COPIES[step](layer)
            assert differing(layer, unbounded) == []


def test_memory_stays_where_it_is():
    """At its full size no tensor of the layer moves, so captured steps stay valid, even after a long call."""
    layer, qkv = windowed(BARE, 100), random_qkv(1, 2000)
    layer.plan(2000)
    call(layer, qkv, 0, 700, 100)
    moves, addresses = layer.moves, [x.data_ptr() for x, _ in layer.state_tensors().values()]
    for start in range(700, 1500, 10):
        call(layer, qkv, start, start + 10, 100)
    call(layer, qkv, 1500, 2000, 100)
    assert layer.moves == moves and [x.data_ptr() for x, _ in layer.state_tensors().values()] == addresses


@pytest.mark.parametrize(("window", "words"), [(100, "sliding window of 100"), (-100, "attention in chunks of 100")])
def test_a_crop_that_reaches_what_is_gone_is_refused(window, words):
    layer, qkv = windowed(BARE, window), random_qkv(2, 1100)
    feed(layer, *qkv, [700, *range(710, 1001, 10)])
    before = {name: x.clone() for name, (x, _) in layer.state_tensors().items()}
    with pytest.raises(UnsupportedError, match=rf"cannot crop 600.* has {words}.*64 can.*fresh cache"):
        layer.crop(-600)
    assert all(torch.equal(before[name], x) for name, (x, _) in layer.state_tensors().items())
    layer.crop(-64)
    assert int(layer.get_seq_length()) == 936
    layer.crop(-936)
    assert int(layer.get_seq_length()) == 0 and int(layer.state["closed"].max()) == 0


def test_a_larger_horizon_takes_more_back():
    """As assisted generation asks for, also where the capacity was fixed before."""
    for length in (None, 4000):
        layer, unbounded = windowed(BARE, 100, length), make_layer(BARE, None)
        layer.take(changes.with_horizon(layer, 200))
        unbounded.take(changes.with_horizon(unbounded, 200))
        layer.plan(3000)
        qkv = random_qkv(1, 1400)
        for x in (layer, unbounded):
            for start in range(0, 1200, 100):
                call(x, qkv, start, start + 100, 100)
            x.crop(-200)
        out, want = (call(x, qkv, 1200, 1400, 100) for x in (layer, unbounded))
        torch.testing.assert_close(out, want, **CLOSE)
        assert differing(layer, unbounded) == []


def test_a_capacity_below_the_window_is_a_limit():
    layer, qkv = windowed(("int8", {}), 1000, max_cache_len=128), random_qkv(1, 200)
    call(layer, qkv, 0, 128, 1000)
    with pytest.raises(CapacityError, match="holds 128 tokens a row, 128 are taken and 1 more came"):
        call(layer, qkv, 128, 129, 1000)


def test_a_reset_layer_is_a_new_one():
    layer, fresh, qkv = windowed(BARE, 50), windowed(BARE, 50), random_qkv(1, 900)
    feed(layer, *qkv, [900])
    layer.reset()
    assert torch.equal(feed(layer, *qkv, [100, 600, 610]), feed(fresh, *qkv, [100, 600, 610]))
