"""The measurement of `compensate_k`: less is left where the pass looked, nothing is gained where queries are alike."""

from __future__ import annotations

import pytest
import torch
from test_eval_scripts import script

from qattn_hf.model_constants.compensation import shares

compensation = script("compensation")


def test_less_is_left_of_errors_where_queries_go_together():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 256, 64, generator=generator)
    mixed = torch.randn(2, 64, 64, generator=generator) * torch.tensor([8.0, 4.0, 2.0] + [0.5] * 61)[:, None]
    queries = torch.randn(2, 500, 64, generator=generator) @ mixed
    of_these, of_others = shares(queries.mT @ queries), shares(torch.eye(64).expand(2, -1, -1))
    for bits in (2, 3):
        assert compensation.left_of(keys, queries, of_these, bits) < 0.6
        # but for numbers near to the middle of two codes, since compensation has them in 64ths of a step
        assert compensation.left_of(keys, queries, of_others, bits) == pytest.approx(1, abs=0.03)
