"""TRL's GRPOTrainer trains a patched model, whose rollouts pack."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_llama
from transformers import AutoTokenizer

from qattn_hf import patch, report
from qattn_hf.assets import demo_model_dir

if sys.version_info < (3, 11):
    pytest.skip("trl needs Python 3.11", allow_module_level=True)
trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")

STEPS = 10
PROMPT = "Question: Ben has 14 cakes. Ben sells 5 cakes. How many cakes does Ben have now?\nAnswer: " * 3


HOW = {
    "generate": {"gradient_checkpointing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "generate_batch": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 32, "max_batch_tokens": 128},
    },
}


@pytest.mark.parametrize(
    "how", ["generate", *(pytest.param(how, marks=pytest.mark.slow) for how in ("checkpointing", "generate_batch"))]
)
def test_ten_steps_of_grpo(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    model = patch(tiny_llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id), "turbo")
    before = model.lm_head.weight.detach().clone()
    packed: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        found = report(model).to_dict()
        pages = found["continuous_batching"]
        packed.append(pages["most_blocks"] * pages["page_tokens"] if pages else found["packed_tokens"])
        return [float(len(set(text))) for text in completions]

    config = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, num_generations=4, beta=0.0,
        max_completion_length=6, learning_rate=1e-2, use_cpu=True, bf16=False, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, **HOW[how],
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    ratios = [value for row in trainer.state.log_history for name, value in row.items() if "clip_ratio" in name]
    assert len(losses) == STEPS and all(map(math.isfinite, losses + ratios))
    assert len(packed) == STEPS and min(packed) >= 64, "every rollout read a packed cache"
    assert not torch.equal(model.lm_head.weight, before)
    assert model.training
