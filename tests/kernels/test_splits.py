"""How many programs share a context in a decode: rules that hold on any GPU, whatever the measured tables say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qattn_hf.methods import get_method, list_methods
from qattn_kernels.chip import DEFAULT, H200, Chip
from qattn_kernels.launch.constants import sizes_of
from qattn_kernels.launch.tuned import tuned_for
from qattn_kernels.ops.decode.table import choose, shares_of

TUNED = tuned_for(H200).decode


@given(st.integers(100, 4000), st.integers(1, 5000), st.sampled_from([32, 64, 128]), st.integers(0, 2))
def test_programs_come_in_whole_waves(places: int, heads: int, block: int, open_programs: int):
    few, many, long, _ = shares_of(places, heads, block, open_programs, TUNED)
    assert 1 <= few <= TUNED.most and few <= many and long * block in (TUNED.long, TUNED.long // 2)
    if few < TUNED.most and heads <= TUNED.whole * places:
        waves = -(-few * heads // places)
        assert few * heads >= TUNED.whole * waves * places or waves == 3
        assert (few + 1) * heads > waves * places  # no room for one more of each
    if long * block < TUNED.long:
        assert few == TUNED.most
    if few == TUNED.most < many < 2 * TUNED.most:
        assert (
            many <= TUNED.most_long and (many + open_programs) * heads <= places
        )  # a long context of few heads: one wave


@pytest.mark.parametrize("method", list_methods())
def test_a_smaller_gpu_runs_fewer_at_once(method: str):
    spec = get_method(method)().last_layer_spec(8)
    size = sizes_of(spec, 8, 4, 128, 1, spec.compute.decode == "int8", False, False)
    large, small = (choose(size, spec, torch.bfloat16, 4, chip).shares for chip in (H200, Chip(40, 100 * 1024)))
    assert small[0] < large[0] and small[2:] == large[2:]
    assert large == choose(size, spec, torch.bfloat16, 4, H200).shares


def test_a_gpu_that_was_not_measured_is_named_once(caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        found = tuned_for(H200._replace(name="NVIDIA L4 of a test", capability=(8, 9)))
    assert found == tuned_for(H200)
    assert caplog.messages == [
        f"no launch configurations were measured on NVIDIA L4 of a test: the file of {DEFAULT} is used. "
        "`qattn bench tiles` measures them"
    ]


@pytest.mark.parametrize(("method", "in_flight"), [("turbo", 3), ("int8", 2)])
def test_loads_in_flight_leave_room_for_other_programs(method: str, in_flight: int):
    spec = get_method(method)().last_layer_spec(8)
    size = sizes_of(spec, 8, 4, 128, 1, spec.compute.decode == "int8", False, False)
    assert choose(size, spec, torch.bfloat16, 4, H200).stages == in_flight
    assert choose(size, spec, torch.bfloat16, 4, H200._replace(shared=1 << 20)).stages == 3
