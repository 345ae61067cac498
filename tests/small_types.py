"""Small random models of the types that people name, with a layer of each kind, and which layers are packed."""

from __future__ import annotations

from typing import Any

import pytest
from models import build
from small_configs import WINDOW
from transformers import CONFIG_MAPPING, PreTrainedModel

from qattn_hf.recipes import sliding

# layers that are packed whatever the setting `sliding` says
PACKED: dict[str, list[bool]] = {
    "gemma2": [False, True],
    "gemma3_text": [False, True],
    "gemma3n_text": [False, True, False, True, False, False],  # the last two share keys with other layers
    "gemma4_text": [False, True],  # of other heads in its full layer
    "gpt_oss": [False, True],
    "mistral": [False, False],
    "phi3": [False, False],
    "llama4_text": [False, True],
    "qwen3_next": [False, True],
    "qwen3_5_text": [False, True],
    "granitemoehybrid": [False, True],
    "falcon_h1": [True, True],
    "lfm2_moe": [False, True],
    "deepseek_v3": [True, True],
}
SHARED_KEYS = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
CHANGES: dict[str, dict[str, Any]] = {  # of configs
    "phi3": {"sliding_window": WINDOW},
    "gpt_oss": {"initializer_range": 0.5},  # with less, what attention loses to codes does not show in logits
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
}


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model in fp32, the same at every call, that stops at no token; `changes` are of its config."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    model = build(model_type, 1, **{**CHANGES.get(model_type, {}), **changes})
    model.generation_config.eos_token_id = None
    return model


def in_packed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep exact windows in the packed cache, as on a GPU whose steps are captured."""
    monkeypatch.setattr(sliding, "why_stock", lambda *_: None)
