"""Masks of steps that the host may not wait for: what is wrong with them is said one call later."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, random_ids, tiny_llama

from qattn_hf import QAttnCache, UnsupportedError, patch, report
from qattn_hf.attention import masks
from qattn_hf.model._compat import CACHE

pytestmark = pytest.mark.usefixtures("no_grad")
TOKENS = 40
WRONG = {
    "too wide": (torch.ones(1, TOKENS + 6, dtype=torch.long), f"has {TOKENS + 6} columns.*must have {TOKENS + 1}"),
    "too narrow": (torch.ones(1, TOKENS, dtype=torch.long), f"has {TOKENS} columns.*must have {TOKENS + 1}"),
    "of the new token alone": (torch.ones(1, 1, dtype=torch.long), f"has 1 columns.*must have {TOKENS + 1}"),
    "a hole": (
        torch.ones(1, TOKENS + 1, dtype=torch.long).index_fill(1, torch.tensor([9]), 0),
        "row 0 has zeros between",
    ),
    "over tokens": (
        torch.ones(1, TOKENS + 1, dtype=torch.long).index_fill(1, torch.arange(9), 0),
        "real tokens of the",
    ),
}


class Arrived:
    """A device event that has completed after `after` queries."""

    def __init__(self, after: int):
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.left = 0


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sees facts of masks two steps late, as of a device."""
    monkeypatch.setattr(masks, "waits_for_nothing", lambda mask: False)
    monkeypatch.setattr(masks, "to_host", lambda facts: (facts, Arrived(1)))


def prompted() -> tuple[torch.nn.Module, QAttnCache, torch.Tensor]:
    model, ids = patch(tiny_llama().to(DEVICE), "int8"), random_ids(1, TOKENS + 4).to(DEVICE)
    return model, model(ids[:, :TOKENS], use_cache=True)[CACHE], ids[:, TOKENS : TOKENS + 1]


@pytest.mark.parametrize("mask", WRONG)
def test_a_wrong_mask_of_a_step_is_refused_when_its_facts_arrive(mask: str, far: None):
    model, cache, token = prompted()
    wrong, said = WRONG[mask]
    model(token, attention_mask=wrong.to(DEVICE), **{CACHE: cache})
    pickle.loads(pickle.dumps(cache))
    model(token, **{CACHE: cache})
    with pytest.raises(UnsupportedError, match=f"{said}.*fresh cache"):
        model(token, **{CACHE: cache})
    model(token, **{CACHE: QAttnCache.for_model(model)})


@pytest.mark.parametrize("mask", WRONG)
@pytest.mark.parametrize("how", ["call", "generate"])
def test_a_prompt_waits_for_the_mask_of_an_earlier_step(mask: str, how: str, far: None):
    model, cache, token = prompted()
    wrong, said = WRONG[mask]
    model(token, attention_mask=wrong.to(DEVICE), **{CACHE: cache})
    prompt = random_ids(1, 60).to(DEVICE)
    with pytest.raises(UnsupportedError, match=f"{said}.*fresh cache"):
        if how == "call":
            model(prompt[:, :5], **{CACHE: cache})
        else:
            model.generate(prompt, max_new_tokens=2, **{CACHE: cache})


@pytest.mark.parametrize("mask", WRONG)
@pytest.mark.parametrize("how", ["crop", "save", "report", "report of the model"])
def test_the_mask_of_the_last_step_is_checked_before(how: str, mask: str, far: None, tmp_path: Path):
    """No call follows, which would find it."""
    model, cache, token = prompted()
    wrong, said = WRONG[mask]
    model(token, attention_mask=wrong.to(DEVICE), **{CACHE: cache})
    cache.crop(0)  # as a stop check asks at every step: it waits for nothing
    tokens, path = cache.get_seq_length(), tmp_path / "prefix.safetensors"
    with pytest.raises(UnsupportedError, match=f"{said}.*fresh cache"):
        if how == "crop":
            cache.crop(-1)
        elif how == "save":
            cache.save(path)
        else:
            report(cache if how == "report" else model)
    assert cache.get_seq_length() == tokens and not path.exists()


def test_right_masks_are_taken(far: None):
    model, cache, token = prompted()
    for i in range(4):
        model(token, attention_mask=torch.ones(1, TOKENS + 1 + i, dtype=torch.long, device=DEVICE), **{CACHE: cache})
    assert report(cache).to_dict()["layers"]
    cache.crop(-1)
    assert cache.get_seq_length() == TOKENS + 3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU: on a CPU masks are checked at once")
@pytest.mark.parametrize("mask", WRONG)
def test_a_gpu_says_so_without_a_wait_of_the_step(mask: str):
    model, cache, token = prompted()
    wrong, said = WRONG[mask]
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(token, attention_mask=wrong.to(DEVICE, non_blocking=True), **{CACHE: cache})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match=f"{said}.*fresh cache"):
        model(token, **{CACHE: cache})
