"""Text that one cache reads in chunks gives the results of a single call, with each token once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import patch, report
from qattn_hf.cli.tune import STEPS, TOKENS
from qattn_hf.fidelity.compare import compare
from qattn_hf.patching import warm
from qattn_hf.reading.chunks import CHUNK, cuts, feed
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes.recipe import find_recipes


@pytest.mark.parametrize(("tokens", "chunk", "steps"), [(200, 61, 10), (122, 61, 0), (5, 61, 3), (3, 61, 9), (1, 1, 1)])
def test_cuts_cover_each_token_once_and_end_in_steps(tokens: int, chunk: int, steps: int):
    at = cuts(tokens, chunk, steps)
    assert at[0] == 0 and at[-1] == tokens and at == sorted(set(at))
    sizes = [b - a for a, b in itertools.pairwise(at)]
    assert sizes[len(sizes) - min(steps, tokens) :] == [1] * min(steps, tokens)
    assert max(sizes) <= chunk


def test_chunks_say_what_one_call_says():
    model, ids = tiny_llama(), random_ids(2, 150)
    with torch.inference_mode():
        whole = model(ids).logits
    chunks = list(feed(model, ids, cuts(150, 61, 5)))
    assert [(c.start, c.stop) for c in chunks][:3] == [(0, 61), (61, 122), (122, 145)]
    torch.testing.assert_close(torch.cat([c.logits for c in chunks], 1), whole, rtol=1e-4, atol=1e-5)


def test_chunks_read_what_earlier_chunks_packed():
    """One call attends to its keys before they are packed; chunks must not."""
    model, ids = patch(tiny_llama(initializer_range=0.3), method="kivi", residual_length=0), random_ids(1, 200)
    with torch.inference_mode():
        whole = model(ids, use_cache=True).logits
    chunks = list(feed(model, ids, cuts(200, 50)))
    assert report(chunks[-1].cache).to_dict()["packed_tokens"] == 192
    off = (torch.cat([c.logits for c in chunks], 1) - whole).abs().amax(-1)[0]
    assert off[:50].max() < 1e-4 * off[64:].mean()  # the first chunk is a separate call; later ones read codes


def test_padding_and_a_cache_that_goes_on():
    model, ids = patch(tiny_llama(), method="none"), random_ids(1, 90)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], 1)
    mask = (padded != 0).long()
    alone = torch.cat([c.logits for c in feed(model, ids, cuts(90, 40))], 1)
    first = list(feed(model, padded[:, :47], [0, 47], mask))
    later = list(feed(model, padded[:, 47:], cuts(50, 20), mask, first[-1].cache))
    both = torch.cat([c.logits for c in (*first, *later)], 1)[:, 7:]
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)


def test_the_calls_of_a_reading_are_told_once_each():
    calls = read_as(random_ids(3, 70), chunk=30, steps=4, batch=2).calls()
    assert sorted(calls) == [(r, *call) for r in (1, 2) for call in ((1, 1), (6, 1), (30, 0), (30, 1))]


def test_a_comparison_compiles_what_its_reading_calls(monkeypatch):
    """Kernels of prompts and batches, which `patch` begins to compile, would keep its own calls waiting."""
    begun: list[Any] = []
    monkeypatch.setattr(warm, "begin_for", lambda model, recipes, calls=None: begun.append(calls))
    reading = read_as(random_ids(1, 100), steps=2)
    for by_layer in (False, True):
        compare(tiny_llama(), find_recipes(["int8", "turbo"]), reading, at_tokens=128, by_layer=by_layer)
    assert len(begun) == 2 * (1 + 2) and set(begun) == {reading.calls()}


def test_a_row_that_tune_reads_has_no_short_chunk():
    """Its kernels would be compiled for a single call."""
    assert (TOKENS - STEPS) % CHUNK == 0
