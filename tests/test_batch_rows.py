"""Which blocks of a request a call of continuous batching writes back to the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Case, case_id, feed, make_layer, random_qkv

from qattn_hf.generate.continuous.batch import Held, batches
from qattn_hf.generate.continuous.pages import Rows

CASES: list[Case] = [("turbo", {}), ("kivi", {}), ("kivi", {"group_size": 64, "residual_length": 20}), ("sinkq", {})]


@pytest.mark.parametrize(("past", "tokens"), [(300, 140), (129, 64), (64, 100)])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_block_that_a_call_closes_is_written_back(case: Case, past: int, tokens: int):
    """Tokens of a residual wait in the row: the call that packs them writes blocks from before its own tokens."""
    layer: Any = make_layer(case)
    qkv = random_qkv(1, past + tokens)
    feed(layer, *qkv, [past])
    before = int(layer.state["closed"])
    feed(layer, *(x[:, :, past:] for x in qkv), [tokens])
    after, block = int(layer.state["closed"]), layer.spec.window.block
    pages = list(range(10, 10 + -(-(past + tokens) // block)))
    (call,) = batches([Held(0, past, tokens, pages, False)], layer.spec.window, torch.device("cpu"), 4)
    assert isinstance(call, Rows)
    _, written, where = call.written.tolist()
    assert after > before and set(range(before, after)) <= set(written)
    assert where == [pages[index] for index in written]
