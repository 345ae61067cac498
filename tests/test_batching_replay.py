"""Continuous batching: a separate cache that gets the same calls gives the same logits.

Prompts begin alike, are read in parts, wait for rows and blocks, lose their blocks, and are cancelled.
"""

from __future__ import annotations

import random
import time

import pytest
from batching import SECONDS, answer, outputs, running
from helpers import tiny_llama
from replay import Recorder, assert_replayed, batch_invariant
from small_types import tiny
from test_continuous_batching import needs_pages, prompts_of

from qattn_hf import patch

pytestmark = needs_pages
REQUESTS, CANCELLED = 8, 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method", "blocks", "shared", "read_again"),
    [
        ("llama", "turbo", 7, True, True),
        pytest.param("llama", "kivi", 7, True, True, marks=pytest.mark.exhaustive),
        pytest.param("llama", "sinkq:sink_skip_layers=0", 10, True, True, marks=pytest.mark.exhaustive),
        ("llama", "int8", 7, True, False),
        ("llama", "turbo:bits=mixed", 7, False, True),
        ("gemma3_text", "turbo:sliding=packed", 7, False, True),
    ],
)
def test_a_separate_cache_gives_the_same_logits(
    model_type: str, method: str, blocks: int, shared: bool, read_again: bool
):
    """`shared` and `read_again`: whether requests shared a prefix, and lost their blocks."""
    model = batch_invariant(patch(tiny_llama() if model_type == "llama" else tiny(model_type), method))
    rng = random.Random(0)
    (base, *ends) = prompts_of(256, *(rng.choice((1, 3, 30, 64, 90)) for _ in range(REQUESTS)))
    prompts = [base[: rng.choice((64, 100, 128, 256))] + end for end in ends]
    batching = {"max_batch_tokens": 100, "max_requests_per_batch": 4}
    with running(model, blocks=blocks, batching=batching) as manager:
        with manager.pause():
            ids = [manager.add_request(prompt, max_new_tokens=rng.choice((1, 24, 70))) for prompt in prompts]
            cancelled = rng.sample(ids, CANCELLED)
            recorder = Recorder(manager, {rng.randrange(3, 60): one for one in cancelled})
        outputs(manager, set(ids) - set(cancelled))
        deadline = time.monotonic() + SECONDS
        while manager.output_router.live and time.monotonic() < deadline:  # cancelled requests have no output
            time.sleep(0.01)
    assert (recorder.shared() > 0, recorder.read_again() > 0) == (shared, read_again)
    assert_replayed(model, recorder)


def test_a_row_that_closes_a_shared_block_keeps_its_codes():
    """Blocks of kivi close 128 tokens late, here in one of two rows that began with the same pages."""
    model, (prefix, *ends) = batch_invariant(patch(tiny_llama(), "kivi")), prompts_of(128, 1, 40, 20)
    with running(model, blocks=32) as manager:
        with manager.pause():
            recorder = Recorder(manager)
        answer(manager, prefix + ends[0], max_new_tokens=1)
        with manager.pause():
            ids = [manager.add_request(prefix + end, max_new_tokens=28) for end in ends[1:]]
        outputs(manager, ids)
    assert recorder.shared() == 2
    assert_replayed(model, recorder)


@pytest.mark.slow
def test_a_kept_prefix_has_no_masks_of_an_earlier_one():
    """The earlier prefix had more blocks, and masks in all of them."""
    model, (prompt, end) = batch_invariant(patch(tiny_llama(), "turbo")), prompts_of(65, 1)
    with running(model, batching={"max_requests_per_batch": 1}) as manager:
        with manager.pause():
            recorder, allocator = Recorder(manager), manager.batch_processor.cache.allocator
            for layer in allocator.layers.values():
                layer.rows["dropped"][allocator.slots :].fill_(255)
        answer(manager, prompt, max_new_tokens=1)
        answer(manager, prompt[:64] + end, max_new_tokens=250)
    assert recorder.shared() == 1
    assert_replayed(model, recorder)
