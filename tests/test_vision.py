"""A vision model whose text decoder can be patched: its answers about an image read the packed cache."""

from __future__ import annotations

import pytest
import torch
from refusals import llava

from qattn_hf import patch, report, unpatch

IMAGE, PATCHES = 100, 4  # the token of an image patch, and the number of patches


@pytest.mark.parametrize("method", ["int8", "turbo"])
def test_an_image_in_the_prompt_is_packed_with_its_text(method: str):
    g = torch.Generator().manual_seed(0)
    text = [torch.randint(1, IMAGE - 1, (1, count), generator=g) for count in (40, 60)]
    ids = torch.cat([text[0], torch.full((1, PATCHES), IMAGE), text[1]], 1)
    model, seen = llava(), {"pixel_values": torch.randn(1, 3, 28, 28, generator=g)}
    with torch.no_grad():
        want = model(ids, **seen).logits
        patch(model, method)
        first = model(ids[:, :-4], **seen)
        got = model(ids[:, -4:], past_key_values=first.past_key_values).logits
        error = float((got - want[:, -4:]).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())
        assert 1e-5 < error < 0.2, "near full precision, and not it"
        answer = model.generate(ids, **seen, max_new_tokens=5, do_sample=False)
        held = report(model).to_dict()
        assert answer.shape == (1, ids.shape[1] + 5)
        assert held["packed_tokens"] + held["open_tokens"] == answer.shape[1] - 1 and held["packed_tokens"] > 0
        assert torch.equal(unpatch(model)(ids, **seen).logits, want)
