"""Contexts beyond a model's positions: `qattn doctor` and `qattn plan` say so, with rope scaling counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import tiny_llama
from transformers import AutoConfig

from qattn_hf.planning.check import check
from qattn_hf.planning.plan import Memory, Planner

THETA = {"rope_theta": 10000.0}
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0}
SMALL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "stated", "positions"),
    [
        ({**THETA, "rope_type": "default"}, 2048, 2048),
        ({**YARN, "original_max_position_embeddings": 2048}, 2048, 8192),  # as Qwen2.5's card says it
        ({**YARN, "original_max_position_embeddings": 512}, 2048, 2048),  # as DeepSeek and gpt-oss state it
        ({**THETA, "rope_type": "linear", "factor": 2.0}, 2048, 4096),
        ({**THETA, "rope_type": "dynamic", "factor": 2.0}, 2048, 4096),
        ({**THETA, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, **SMALL}, 2048, 2048),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else None,
)
def test_rope_scaling_counts(rope: dict[str, Any], stated: int, positions: int):
    assert check(tiny_llama(rope_parameters=rope, max_position_embeddings=stated).config).positions == positions


def test_parameters_for_each_kind_of_layer_state_all_positions():
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=4096, num_hidden_layers=2, hidden_size=32)
    assert check(config).positions == 4096


@pytest.mark.parametrize("rope", [None, {**YARN, "original_max_position_embeddings": 2048}], ids=["plain", "yarn"])
def test_the_commands_warn_beyond_the_positions(rope, qattn, tmp_path, monkeypatch):
    scaling = {} if rope is None else {"rope_parameters": rope}
    tiny_llama(head_dim=64, **scaling).config.save_pretrained(tmp_path)
    positions = 2048 if rope is None else 8192
    monkeypatch.setattr(Planner, "longest", lambda *_: longest[0])
    monkeypatch.setattr(Planner, "largest", lambda *_: 1)
    monkeypatch.setattr(Planner, "memory", lambda *_: Memory(1, 1, 1, 1))
    model, longest = (str(tmp_path), "--gpu-memory", "1GiB", "--method", "int8"), [64]
    for tokens in (positions, positions + 64):
        said = f"{tokens} tokens are more than the {positions} positions"
        code, out, _ = qattn("doctor", str(tmp_path), "--at-tokens", str(tokens))
        assert code == 0 and (said in out) == (tokens > positions)
        for context, longest[0] in ((tokens, 64), (64, tokens)):
            code, out, _ = qattn("plan", *model, "--context", str(context))
            assert code == 0 and (said in out) == (tokens > positions)
    assert json.loads(qattn("plan", *model, "--json")[1])["positions"] == positions
