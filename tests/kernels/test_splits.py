"""How many programs share a context in a decode: rules that hold on any GPU, whatever the measured tables say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qattn_hf.methods import get_method, list_methods
from qattn_kernels.launch.constants import sizes_of
from qattn_kernels.ops.decode.table import H200, LONG, MOST, MOST_LONG, WHOLE, Chip, choose, plan


@given(st.integers(100, 4000), st.integers(1, 5000), st.sampled_from([32, 64, 128]), st.integers(0, 2))
def test_programs_come_in_whole_waves(places: int, heads: int, block: int, open_programs: int):
    few, many, long, _ = plan(places, heads, block, open_programs)
    assert 1 <= few <= MOST and few <= many and long * block in (LONG, LONG // 2)
    if few < MOST and heads <= WHOLE * places:
        waves = -(-few * heads // places)
        assert few * heads >= WHOLE * waves * places or waves == 3
        assert (few + 1) * heads > waves * places  # no room for one more of each
    if long * block < LONG:
        assert few == MOST
    if few == MOST < many < 2 * MOST:
        assert many <= MOST_LONG and (many + open_programs) * heads <= places  # a long context of few heads: one wave


@pytest.mark.parametrize("method", list_methods())
def test_a_smaller_gpu_runs_fewer_at_once(method: str):
    spec = get_method(method)().last_layer_spec(8)
    size = sizes_of(spec, 8, 4, 128, 1, spec.compute.decode == "int8", False, False)
    large, small = (choose(size, spec, torch.bfloat16, 4, chip).plan for chip in (H200, Chip(40, 100 * 1024)))
    assert small[0] < large[0] and small[2:] == large[2:]
    assert large == choose(size, spec, torch.bfloat16, 4, H200).plan
