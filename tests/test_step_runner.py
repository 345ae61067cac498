"""Which runner the steps of a call get, and the reason that a report gives."""

from __future__ import annotations

import pytest
from fake_graphs import FakeGraphs
from helpers import tiny_llama
from transformers import CompileConfig
from transformers.generation import GenerationMode as Mode

from qattn_hf import UnsupportedError, patch
from qattn_hf.generate.step_runner import NOT_ASKED, Call, runner_of_model, step_runner
from qattn_hf.model.tensor_parallel import Shard

CONFIG = CompileConfig()
CASES: list[tuple[str, Call, tuple[str, str | None]]] = [
    ("auto", Call(), ("graph", None)),
    ("auto", Call(Mode.BEAM_SEARCH), ("graph", None)),
    ("auto", Call(Mode.SAMPLE), ("eager", NOT_ASKED)),  # until Transformers asks
    ("auto", Call(Mode.BEAM_SEARCH, plain=True), ("eager", NOT_ASKED)),
    ("auto", Call(Mode.ASSISTED_GENERATION, CONFIG), ("eager", NOT_ASKED)),
    ("auto", Call(compile_config=CONFIG), ("compile", "the caller gave a compile_config")),
    ("auto", Call(Mode.DOLA_GENERATION), ("eager", "dola generation is not captured")),
    ("fused", Call(), ("fused", None)),
    ("fused", Call(Mode.BEAM_SEARCH), ("fused", None)),
    ("compile", Call(), ("compile", None)),
    ("compile", Call(Mode.BEAM_SAMPLE), ("eager", "beam sample does not ask for compiled calls")),
    ("eager", Call(Mode.BEAM_SEARCH), ("eager", None)),
    ("eager", Call(compile_config=CONFIG), ("compile", "the caller gave a compile_config")),
]


@pytest.mark.parametrize(("decode", "call", "want"), CASES)
def test_the_runner_of_a_call(fake: FakeGraphs, decode: str, call: Call, want: tuple[str, str | None]):
    how, why = step_runner(patch(tiny_llama(), "turbo", decode=decode), call)
    assert how == want[0] and (why == want[1] or str(why).startswith(f"{want[1]};"))


def test_a_model_that_exits_early_runs_eagerly(fake: FakeGraphs):
    model = patch(tiny_llama(), "turbo")
    model.config.num_hidden_layers -= 1
    assert step_runner(model, Call()) == ("eager", "it exits early, to draft for itself")


def test_a_split_model_is_captured_only_if_asked(fake: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
    """A captured step holds the communicator, and `destroy_process_group` would wait for it."""
    model = tiny_llama()
    monkeypatch.setattr("qattn_hf.generate.step_runner.shard_of", lambda model: Shard(0, 2))
    how, why = runner_of_model(model, "auto")
    assert how == "eager" and "release(model)" in str(why)
    assert runner_of_model(model, "graph") == ("graph", None)
    with pytest.raises(UnsupportedError, match=r"decode='fused'.*decode='graph'"):
        runner_of_model(model, "fused")
    compiled = runner_of_model(model, "compile")
    assert compiled.how == "compile" and not compiled.captures
