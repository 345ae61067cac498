"""Settings of a checkpoint that `qattn serve` takes, leaves out, or changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_continuous_batching import needs_pages
from transformers import GenerationConfig

here = pytest.importorskip(
    "served", reason="no server is installed: pip install 'qattn-hf[serve]'", exc_type=ImportError
)


@needs_pages
def test_settings_of_a_checkpoint_that_batching_does_not_have_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server starts without them, and answers."""
    from qattn_hf.server.batching import Batching

    model, answers, said, start = here.small_model(tmp_path), [], [], Batching.start
    monkeypatch.setattr(Batching, "start", lambda self: said.append(start(self)) or said[-1])
    for given in ({}, {"repetition_penalty": 1.5, "guidance_scale": 2.0, "forced_eos_token_id": 1}):
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
        with here.served(model) as client:
            answers.append(client.complete("The ship", max_tokens=8, temperature=0))
    assert "left out" not in said[0] and answers[0] == answers[1]
    assert said[1].endswith("settings: repetition_penalty=1.5, guidance_scale=2.0, forced_eos_token_id=1")


def test_a_checkpoint_with_stop_strings_and_no_cache_is_served_in_turn(tmp_path: Path):
    """Neither is a setting that `generate` takes as it is: the strings need a tokenizer, and answers need a cache."""
    model = here.small_model(tmp_path)
    GenerationConfig(stop_strings=["e"], use_cache=False, eos_token_id=2).save_pretrained(model)
    with here.served(model, batching=False) as client:
        status, body = client.ask("/v1/completions", {"prompt": "The ship", "max_tokens": 8, "temperature": 0})
    assert status == 200, body
    assert body["choices"][0]["finish_reason"] == "stop" and "e" not in body["choices"][0]["text"]


def test_a_request_without_settings_has_the_checkpoints():
    greedy, warm = GenerationConfig(), GenerationConfig(do_sample=True, temperature=0.6, top_k=20)

    def settings(config: GenerationConfig, **given: Any) -> dict[str, Any]:
        return here.sampling_of(here.CompletionRequest.model_validate({"prompt": "a", **given}), config)

    for config, given in (
        (greedy, {}),
        (greedy, {"seed": 1}),
        (warm, {"temperature": 0}),
        (warm, {"temperature": 1e-9}),
    ):
        assert settings(config, **given) == {"do_sample": False}
    assert settings(warm) == {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0}
    assert settings(warm, top_k=0, seed=3) == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 3,
    }
    assert settings(greedy, top_p=0.9) == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9}
