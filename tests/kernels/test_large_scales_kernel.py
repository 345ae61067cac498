"""Keys and values far beyond fp16 in kernels: state and counts of clamped values equal the reference's."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, case_id, make_layer
from test_fused_kernels import differing, feed, inputs

from qattn_hf.cache.report_rows import layer_row
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
WIDE: list[Case] = [  # one of each format whose scales have 6 bits of exponent, and none in fp16
    ("turboquant", {"k_format": "turbo4", "v_format": "turbo3"}),
    ("turboquant", {"k_format": "q8", "v_format": "q8"}),
    ("nf4", {}),
    ("turbo", {"v_scale": "token"}),
]
IN_FP16: list[Case] = [  # one of each format with scales or zero points in fp16; keys of the second have wide norms
    ("turboquant", {"k_format": "q4", "v_format": "q8"}),
    ("kivi", {"bits": 2, "group_size": 64, "residual_length": 0, "token_norm": True, "clip": 0.75}),
]


@pytest.mark.parametrize(("key", "value"), [(1e6, 1e8), (1e-5, 1e-8)])
@pytest.mark.parametrize("case", [*WIDE, *IN_FP16], ids=case_id)
def test_scales_beyond_fp16_are_the_references_and_counted_alike(case: Case, key: float, value: float):
    q, k, v = inputs(1, 66)
    scaled = q, k * key, v * value
    one, other = make_layer(case, 128), make_layer(case, 128)
    feed(reference_step, one, scaled, [65, 66])
    got = feed(fused_step, other, scaled, [65, 66])
    assert differing(one, other) == [] and all(torch.isfinite(x).all() for x in got)
    rows = [layer_row(0, layer, case[0]) for layer in (one, other)]
    assert rows[0]["clamped_scales"] == rows[1]["clamped_scales"]
    assert (rows[0]["clamped_scales"] > 0) == (case in IN_FP16 and key > 1)
