"""Causal types of transformers: `patch` treats each as in the recorded sweep, so that changes are visible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from known_types import KNOWN, known_table
from small_configs import small_config
from transformers import AutoModelForCausalLM
from type_tables import SERVED as SERVED_RESULTS

from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous.model_pages import check_layers
from qattn_hf.generate.continuous.transformers_api import continuous_api
from qattn_hf.model.layer_kinds import model_layers
from qattn_hf.model.supported_models import check_model
from qattn_hf.recipes.recipe import find_recipe

EVAL = Path(__file__).parent.parent / "eval"
SWEEP, RESULTS = EVAL / "models.py", EVAL / "results"
RECORD = json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["model_type"]: row for row in RECORD["rows"] if row["result"] != "stock"}
FIRST = ["llama", "mistral", "gemma4_text", "zamba2", "minimax", "deepseek_v3", "deepseek_v4", "bert", "mamba", "gptj"]
LATER = ["diffllama", "git", "jetmoe", "doge", "gemma4_unified"]  # refused by their first call
SERVED = 133  # types that must run, of 196
BATCHED = 91  # types that continuous batching must serve

needs_recorded_version = pytest.mark.skipif(
    transformers.__version__ != RECORD["versions"]["transformers"],
    reason=f"recorded with transformers {RECORD['versions']['transformers']}",
)


def said_of(model_type: str) -> tuple[str | None, int, int]:
    """Return the reason of a refusal or None, the number of packed layers, and the number of layers with keys or
    states."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(model_type))
    try:
        check_model(model)
        own = model_layers(model.config)
    except UnsupportedError as error:
        return str(error), 0, 0
    return None, own.count(None), len([spec for spec in own if spec is None or spec.reads is None])


def batches(model_type: str) -> str:
    """Return `runs`, or why layers of this type have no pages."""
    recipe = find_recipe("none", None, {"impl": "reference", "family": False})
    try:
        check_layers(recipe.layer_specs(small_config(model_type), paged=True))
    except UnsupportedError as error:
        return str(error)
    return "runs"


LATE = ("one length of all rows", "KV heads", "several times")  # refused by a forward, or by the modules


@pytest.mark.slow
@needs_recorded_version
def test_types_batch_as_recorded():
    recorded = {name: row["batching"] for name, row in ROWS.items() if "batching" in row}
    early = {name: "runs" if any(word in why for word in LATE) else why for name, why in recorded.items()}
    assert {name: batches(name) for name in recorded} == early


@needs_recorded_version
@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=() if t in FIRST else pytest.mark.slow) for t in ROWS if t not in LATER]
)
def test_a_type_is_served_as_recorded(model_type: str):
    row = ROWS[model_type]
    reason, packed, layers = said_of(model_type)
    assert reason == (row["reason"] if row["result"] == "refused" else None)
    if reason is None:
        assert (packed, layers) == (row["packed"], row["of"])


def swept(*arguments: str) -> dict[str, dict[str, Any]]:
    """Rows of the sweep by type. It forks, which is safe only in a process without threads."""
    command = [sys.executable, SWEEP, *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return {row["model_type"]: row for row in map(json.loads, found.stdout.splitlines())}


@pytest.mark.exhaustive
def test_the_sweep_measures_types_in_processes():
    rows = swept("gemma3_text", "diffllama")
    assert len(rows) == 2
    for model_type, row in rows.items():
        recorded = ROWS[model_type]
        assert {key: row.get(key) for key in ("result", "layers")} == {k: recorded[k] for k in ("result", "layers")}
        if continuous_api is not None:
            assert row.get("batching") == recorded.get("batching")
    late = swept("diffllama", "--seconds", "0.01")["diffllama"]
    assert (late["result"], late["reason"]) == ("error", "over 0.01 s")


def test_families_that_people_run_are_served():
    results = {row["model_type"]: row["result"] for row in RECORD["rows"]}
    refused = [name for name, types in KNOWN.items() if any(results[t] not in SERVED_RESULTS for t in types)]
    assert len(KNOWN) == 30 and refused == ["DeepSeek-V3.2", "GLM-5"]
    assert known_table(RESULTS).startswith("28 of 30 families")


def test_enough_types_run_and_none_fails():
    results = [row["result"] for row in RECORD["rows"]]
    assert len(results) == 196 and "error" not in results
    assert sum(result in ("runs", "part", "own") for result in results) >= SERVED
    assert sum(row.get("batching") == "runs" for row in RECORD["rows"]) >= BATCHED
    reasons = [row["reason"] for row in RECORD["rows"] if row["result"] == "refused"]
    reasons += [row["batching"] for row in RECORD["rows"] if row.get("batching", "runs") != "runs"]
    assert all(len(reason) > 30 for reason in reasons)
