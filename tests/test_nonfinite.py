"""A hidden state that is not finite in the middle of a model, as fp16 overflows leave it."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, case_id, cases, random_ids, tiny_llama

from qattn_hf import patch, report

IDS = random_ids(2, 150)


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_one_broken_token_takes_no_other_with_it(case: Case):
    """Two layers: what the first made of the others must be finite in the second's keys."""
    model = patch(tiny_llama(num_hidden_layers=3), case[0], **case[1])

    def overflow(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[1, 70, 5] = torch.inf
        return out

    handle = model.model.embed_tokens.register_forward_hook(overflow)
    out = model(IDS)
    handle.remove()
    finite = out.logits.isfinite().all(-1)
    assert not finite[1, 70]
    finite[1, 70] = True
    assert finite.all()
    layers = report(out.past_key_values).to_dict()["layers"]
    assert [row["nonfinite"] for row in layers] == [1, 1, 1]  # a token, however many KV heads it has
    assert "1 tokens not finite" in str(report(out.past_key_values))
    assert model(IDS[:, :5], past_key_values=out.past_key_values).logits.isfinite().all()


def test_tokens_broken_in_one_head_each_are_counted_each():
    model = patch(tiny_llama(), "turbo", sink_num=2)
    weight = model.model.layers[0].self_attn.k_proj.weight

    def overflow(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        for token, head in ((30, 0), (31, 1), (90, 0), (90, 1), (140, 1)):
            out[0, token, 16 * head] = torch.nan
        return out

    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(overflow)
    cache = model(IDS).past_key_values
    handle.remove()
    assert weight.isfinite().all()
    rows = report(cache).to_dict()["layers"]
    assert [row["nonfinite"] for row in rows] == [4, 0]
    cache.crop(-20)
    assert report(cache).to_dict()["layers"][0]["nonfinite"] == 3
