"""Layers of a checkpoint that predict several tokens (`use_mtp=True`), as drafts over a packed cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_ids
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from qattn_hf import patch, report, unpatch

pytestmark = pytest.mark.usefixtures("no_grad")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.15, "n_routed_experts": 2,
    "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
MODELS = {
    "glm4_moe": Glm4MoeConfig(**SIZES, num_key_value_heads=2, head_dim=16),
    "deepseek_v3": DeepseekV3Config(**SIZES, num_key_value_heads=4, **LATENT),
}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def random_drafts(monkeypatch: pytest.MonkeyPatch) -> list[MtpModel]:
    """Random layers in place of a checkpoint's: transformers finds those by names of the released models alone."""
    made: list[MtpModel] = []

    def build(cls: type[MtpModel], main: PreTrainedModel, **kwargs: Any) -> MtpModel:
        torch.manual_seed(1)
        made.append(cls(main, main.config.num_mtp_layers).eval())
        for parameter in made[-1].layers.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        return made[-1]

    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(build))
    return made


@pytest.mark.parametrize("method", ["none", "int8", "turbo"])
@pytest.mark.parametrize("kind", MODELS)
def test_drafted_tokens_are_the_greedy_ones(kind: str, method: str, random_drafts: list[MtpModel]):
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(MODELS[kind]).eval(), random_ids(1, 70)
    before = model.config._attn_implementation
    want = patch(model, method).generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, use_mtp=True, **GREEDY), want)
    assert report(model).to_dict()["packed_tokens"] >= 64
    assert random_drafts[0].config._attn_implementation == before != model.config._attn_implementation
    unpatch(model)
    assert torch.equal(model.generate(ids, use_mtp=True, **GREEDY), model.generate(ids, **GREEDY))
