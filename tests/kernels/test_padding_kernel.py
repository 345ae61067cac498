"""Padding after a row's tokens, whose queries read the row: kernels against their specification."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, case_id, error, make_layer
from kernel_cases import FORMATS
from test_fused_kernels import ROUNDING, differing, inputs

from qattn_kernels.layer.scores import Scores
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@pytest.mark.slow
@pytest.mark.parametrize("case", FORMATS, ids=case_id)
def test_padding_after_the_tokens_reads_their_row(case: Case):
    """In a long call, then in a short one that closes a block: kernels agree with the reference, and padding with large
    queries changes no token."""
    spans = [[[0, 61], [5, 35]], [[0, 3], [1, 2]]]
    outs, layers = [], []
    for run, loud in ((reference_step, 1.0), (fused_step, 1.0), (fused_step, 1e3)):
        layer, out = make_layer(case, 128), []
        for (columns, rows), seed in zip(((64, spans[0]), (5, spans[1])), (0, 1), strict=True):
            q, k, v = inputs(2, columns, seed=seed)
            span = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
            if not layer.is_initialized:
                layer.lazy_initialization(k, v)
            after = torch.arange(columns, device=DEVICE) >= span.sum(1)[:, None]
            q = torch.where(after[:, None, :, None], q * loud, q)
            past = [2] if run is fused_step else []
            out.append(run(q, k, v, span, layer.state, layer.spec, Scores(q.shape[-1] ** -0.5), *past)[0])
        outs.append(out)
        layers.append(layer)
    assert differing(layers[0], layers[1]) == differing(layers[1], layers[2]) == []
    for i, (want, got, louder) in enumerate(zip(*outs, strict=True)):
        for row, (first, count) in enumerate(spans[i]):
            assert not got[row, :, :first].any()
            assert torch.equal(got[row, :, first : first + count], louder[row, :, first : first + count])
            assert want[row, :, first:].any(-1).all()
        assert error(got, want) < ROUNDING
