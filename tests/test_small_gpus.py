"""The plans of `eval/small_gpus.py`: configs with the sizes of released models, and a record that agrees with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_gpus
from small_gpus import MODELS, SETTINGS, SHAPES, weights_of
from transformers import AutoConfig

from qattn_hf.planning.check import without_weights

RECORD = Path(small_gpus.__file__).parent / "results" / "small-gpus.json"
ROWS = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
# Billions of parameters that the model cards name; of Gemma 3 those of the text model.
PARAMETERS = {
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3.1-8b": 8.03,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.8,
    "phi-4": 14.7,
    "gpt-oss-20b": 20.9,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_config_has_the_size_of_the_released_model(name: str):
    config = AutoConfig.from_pretrained(SHAPES / f"{name}.json")
    parameters = sum(weight.numel() for weight in without_weights(config).parameters())
    assert parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)  # three digits are given
    found = weights_of(config, MODELS[name])
    recorded = [row for row in ROWS if row["model"] == name]
    assert [row["setting"] for row in recorded] == [*SETTINGS]
    for row in recorded:
        assert {key: row[key] for key in found} == found
    assert found["read_bytes"] <= found["read_bytes_many"] <= found["weight_bytes"]


def test_gpt_oss_takes_what_its_checkpoint_takes():
    config = AutoConfig.from_pretrained(SHAPES / "gpt-oss-20b.json")
    assert weights_of(config, "MXFP4")["weight_bytes"] / 1e9 == pytest.approx(13.76, rel=0.001)


def test_fewer_bits_read_less_and_let_more_rows_in():
    for name in MODELS:
        rows = {row["setting"]: row for row in ROWS if row["model"] == name}
        sizes = [rows[setting]["step_kv_bytes"] for setting in SETTINGS]
        assert sizes == sorted(sizes, reverse=True)
        most = [rows[setting]["rows"] for setting in SETTINGS]
        assert most == sorted(most)
        assert rows["none"]["longest"] < rows["int8"]["longest"] < rows["turbo"]["longest"]
