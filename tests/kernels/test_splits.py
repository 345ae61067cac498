"""How many programs share a context in a decode: rules that hold on any GPU, whatever the measured tables say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qattn_hf.methods import get_method, list_methods
from qattn_kernels.chip import DEFAULT, H200, Chip
from qattn_kernels.launch.constants import WHOLE, sizes_of
from qattn_kernels.launch.tuned import tuned_for
from qattn_kernels.ops.decode.table import ALONE, choose, shares_of

TUNED = tuned_for(H200).decode


CASES = {
    "places": st.integers(100, 4000),
    "heads": st.integers(1, 5000),
    "block": st.sampled_from([32, 64, 128]),
    "ring": st.integers(0, 4),
    "pool": st.booleans(),
}


@given(**CASES)
def test_programs_come_in_whole_waves(places: int, heads: int, block: int, ring: int, pool: bool):
    shares = shares_of(places, heads, block, ring, pool, TUNED)
    few, many, long, least, opened, *_ = shares
    assert few >= 1 and many >= 1 and 1 <= least <= TUNED.least and long * block >= TUNED.long // 4
    assert opened == ring + pool or (opened == 1 and ring <= 1)  # one program reads a ring and then sinks
    if few == TUNED.most and many > few:  # a long context of few heads: one wave
        assert many <= TUNED.most_long and (many + opened) * heads <= places
    elif few < TUNED.most and ring <= 1 and heads <= TUNED.whole * places:
        waves = -(-(few + opened) * heads // places)
        assert (few + opened) * heads >= TUNED.whole * waves * places or waves >= 3
        assert (few + opened + 1) * heads > waves * places  # no room for one more of each


@given(**CASES)
def test_many_rows_share_long_contexts_among_whole_waves_too(
    places: int, heads: int, block: int, ring: int, pool: bool
):
    own = shares_of(places, heads, block, ring, pool, TUNED._replace(long=4 * block))  # as a user's file may say
    assert not own.large or own.many <= own.few * own.long
    few, many, long, _, opened, large, part = shares_of(places, heads, block, ring, pool, TUNED)
    assert many <= 2 * (few + opened) + (large == 1) or few == TUNED.most
    if large:  # the small splits share what is left, and every long context has a block for each
        assert large <= max(1, 3 * places // heads) and large < many
        assert 7 / 8 * WHOLE < large * part < WHOLE and many <= few * long


@pytest.mark.parametrize("method", list_methods())
def test_a_smaller_gpu_runs_fewer_at_once(method: str):
    spec = get_method(method)().last_layer_spec(8)
    size = sizes_of(spec, 8, 4, 128, 1, spec.compute.decode == "int8", False, False)
    large, small = (choose(size, spec, torch.bfloat16, 4, chip).shares for chip in (H200, Chip(40, 100 * 1024)))
    assert small.few < large.few and small.many < large.many and small.long == large.long and small.open == large.open
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


@pytest.mark.parametrize(
    ("method", "settings", "few"),
    [("int8", {}, 1), ("fp8", {}, 1), ("turbo", {}, 3), ("int8", {"sparse_v_tau": 0.01}, 2)],
)
def test_one_program_reads_a_short_row_of_many(method: str, settings: dict[str, float], few: int):
    """64 rows and 8 KV heads, if the program can store the output: no open tokens, and no counters of sparse V."""
    spec = get_method(method)(**settings).last_layer_spec(8)
    size = sizes_of(spec, 8, 4, 128, 1, spec.compute.decode == "int8", False, False)
    shares = choose(size, spec, torch.bfloat16, 64, H200).shares
    assert shares.few == few
    if few == 1:
        assert shares.long * size.BLOCK == ALONE and shares.many > 1
        rotated = size._replace(V=size.V._replace(ROTATION="a rotation"))
        assert choose(rotated, spec, torch.bfloat16, 64, H200).shares.few == 2
