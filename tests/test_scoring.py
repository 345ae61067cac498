"""How many scored tokens of each row read packed tokens, which lm-eval's results state."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import patch
from qattn_hf.lm_eval.scoring import Text, score

pytestmark = pytest.mark.usefixtures("no_grad")
CHUNK = 64


def text(context: int, continuation: int, seed: int) -> Text:
    ids = random_ids(1, context + continuation, seed)[0].tolist()
    return Text(tuple(ids[:-1]), [ids[context:]])


def test_no_row_counts_more_than_its_own_tokens():
    """Rows of a batch end at different columns of the last chunk, and one has no packed token when it is scored."""
    model = patch(tiny_llama(), "turbo")
    texts = [text(200, 40, 1), text(130, 100, 2), text(1, 40, 3)]
    found, _ = score(model, texts, CHUNK, 0)
    # the third has read nothing before its first chunk of scored tokens, and has no second one
    assert [one.through_packed for one in found] == [40, 100, 0]
    alone = [score(model, [one], CHUNK, 0)[0][0] for one in texts]
    assert [one.through_packed for one in alone] == [one.through_packed for one in found]
    logs = [torch.tensor([row.answers[0][0] for row in rows]) for rows in (found, alone)]
    torch.testing.assert_close(*logs, rtol=1e-4, atol=0)  # sums of fp32 logits in batches of other shapes
