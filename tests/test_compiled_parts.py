"""Captured steps with compiled norms, MLPs and RoPE: which parts, when, and that the model stays as it is."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fake_graphs import GREEDY, IDS, FakeGraphs, as_on_a_gpu, path
from helpers import random_ids, tiny_llama
from small_types import in_packed_cache, tiny
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from qattn_hf import UnsupportedError, patch
from qattn_hf.generate.cuda_graph import compiled_parts, graph
from qattn_hf.generate.cuda_graph.capture import fingerprint
from qattn_hf.generate.cuda_graph.compiled_parts import CompiledParts, parts_of

ALL = ("fused", "norms, MLPs and RoPE compiled")
PATCHED = ["", "model"]  # modules whose forward `patch` replaces


class Backend:
    """In place of Inductor: runs the traced operations as they are. Counts what it compiles, which no capture may."""

    def __init__(self, fake: FakeGraphs):
        self.fake, self.compiled, self.error = fake, 0, ""

    def __call__(self, traced: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        assert not self.fake.capturing
        if self.error:
            raise RuntimeError(self.error)
        self.compiled += 1
        return traced.forward


@pytest.fixture
def backend(fake: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Compile by `Backend`, and change over after five replays."""
    found, compile_ = Backend(fake), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, fullgraph, dynamic, options: compile_(call, fullgraph=True, backend=found)
    )
    monkeypatch.setitem(graph.FUSE_AFTER, "auto", 5)
    return found


def model_of(decode: str = "auto", model: PreTrainedModel | None = None) -> Any:
    return patch(as_on_a_gpu(tiny_llama() if model is None else model), "turbo", decode=decode)


def changed_forwards(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_a_long_answer_changes_over(fake: FakeGraphs, backend: Backend, monkeypatch, model_type: str):
    in_packed_cache(monkeypatch)
    model = model_of(model=tiny(model_type))
    want = model_of("eager", tiny(model_type)).generate(IDS, **{**GREEDY, "max_new_tokens": 20})
    before = fingerprint(model), changed_forwards(model)
    assert torch.equal(model.generate(IDS, **{**GREEDY, "max_new_tokens": 20}), want)
    assert path(model) == ALL
    # tokens 1 and 2 are of the prompt and of an eager step, 3 to 7 of the first graph, 8 of the step that compiles
    assert (fake.captured, fake.replayed) == (2, 17) and backend.compiled > 0
    assert (fingerprint(model), changed_forwards(model)) == before
    compiled = backend.compiled
    assert torch.equal(model.generate(IDS, **{**GREEDY, "max_new_tokens": 20}), want)
    assert (fake.captured, fake.replayed, backend.compiled) == (2, 36, compiled) and path(model) == ALL


def test_the_steps_before_the_change_are_dropped(fake: FakeGraphs, backend: Backend):
    model = model_of()
    held = model.generate(IDS, return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 6})
    assert path(model) == ("graph", None) and len(model._qattn.pool.graphs) == 1
    model.generate(IDS, **GREEDY)  # over other arenas
    assert path(model) == ALL and len(model._qattn.pool.graphs) == 1
    assert held.sequences.shape[1] == IDS.shape[1] + 6


def test_a_changed_model_pays_again_before_it_compiles(fake: FakeGraphs, backend: Backend):
    model, few = model_of(), {**GREEDY, "max_new_tokens": 5}
    model.generate(IDS, **GREEDY)
    assert path(model) == ALL
    compiled = backend.compiled
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
    model.generate(IDS, **few)
    assert path(model) == ("graph", None) and backend.compiled == compiled
    model.generate(IDS, **GREEDY)
    assert path(model) == ALL


def test_each_kind_of_step_counts_its_replays(fake: FakeGraphs, backend: Backend):
    model = model_of()
    model.generate(IDS, **GREEDY)
    assert path(model) == ALL
    compiled = backend.compiled
    model.generate(IDS[:1], **{**GREEDY, "max_new_tokens": 5})
    assert path(model) == ("graph", None) and backend.compiled == compiled
    model.generate(IDS[:1], **GREEDY)
    assert path(model) == ALL and backend.compiled > compiled


@pytest.mark.slow
def test_settings_of_decode(fake: FakeGraphs, backend: Backend):
    want = model_of("eager").generate(IDS, **GREEDY)
    for decode, ran, captures in (("graph", ("graph", None), 1), ("fused", ALL, 1)):
        model, before = model_of(decode), fake.captured
        assert torch.equal(model.generate(IDS, **GREEDY), want)
        assert path(model) == ran and fake.captured - before == captures
    assert torch.equal(model.generate(IDS[:1], prompt_lookup_num_tokens=3, **GREEDY), want[:1]), "drafts are a graph"


def test_the_mode_of_autograd_may_change_between_steps(fake: FakeGraphs, backend: Backend):
    model, want = model_of("fused"), model_of("eager").generate(IDS, **GREEDY)
    for inference, tokens in ((True, 3), (False, 12), (True, 12)):  # compiled in the first call, captured in the second
        with torch.inference_mode(inference):
            got = model.generate(IDS, **{**GREEDY, "max_new_tokens": tokens})
        assert torch.equal(got, want[:, : IDS.shape[1] + tokens])
    assert path(model) == ALL and fake.captured == 1


def test_a_compiler_that_fails_leaves_the_graph(fake: FakeGraphs, backend: Backend):
    backend.error = "no C compiler"
    model, want = model_of(), model_of("eager").generate(IDS, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), want)
        how, why = path(model)
        assert how == "graph" and str(why).startswith("compiling its norms, MLPs and RoPE failed (")
        assert "no C compiler" in str(why)
    assert fake.captured == 1 and changed_forwards(model) == PATCHED
    strict = model_of("fused")
    with pytest.raises(UnsupportedError, match=r"decode='fused'.*no C compiler.*decode='auto'"):
        strict.generate(IDS, **GREEDY)
    backend.error = ""
    assert torch.equal(strict.generate(IDS, **GREEDY), want) and path(strict) == ALL


def test_torch_compile_may_be_missing_or_turned_off(fake: FakeGraphs, backend: Backend, monkeypatch):
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not supported on Python 3.20")

    for compile_, said in ((missing, "Python 3.20"), (lambda function, **_: function, "TORCH_COMPILE_DISABLE")):
        monkeypatch.setattr(torch, "compile", compile_)
        model = model_of()
        model.generate(IDS, **GREEDY)
        assert path(model)[0] == "graph" and said in str(path(model)[1])


def test_a_capture_that_fails_leaves_the_graph(fake: FakeGraphs, backend: Backend, monkeypatch):
    model, want = model_of(), model_of("eager").generate(IDS, **GREEDY)
    record = graph.record

    def failing(run: Any, *args: Any) -> Any:
        fake.error = RuntimeError("not permitted") if isinstance(run.func, CompiledParts) else None
        return record(run, *args)

    monkeypatch.setattr(graph, "record", failing)
    assert torch.equal(model.generate(IDS, **GREEDY), want)
    assert path(model) == ("graph", "capturing its compiled norms, MLPs and RoPE failed (not permitted)")
    assert fake.captured == 1 and changed_forwards(model) == PATCHED


def test_a_model_without_such_parts_keeps_its_graph(fake: FakeGraphs, backend: Backend, monkeypatch):
    monkeypatch.setattr(compiled_parts, "parts_of", lambda model: iter(()))
    model = model_of()
    assert torch.equal(model.generate(IDS, **GREEDY), model_of("eager").generate(IDS, **GREEDY))
    assert path(model) == ("graph", "no norm, MLP or RoPE of it can be compiled") and fake.captured == 1


def test_a_step_that_fails_leaves_no_changed_forward(fake: FakeGraphs, backend: Backend, monkeypatch):
    model, mlp = model_of("fused"), LlamaMLP.forward
    steps = []

    def failing(self: Any, x: torch.Tensor) -> torch.Tensor:
        steps.append(x.shape[1])
        if steps.count(1) == 4:  # in the second layer, while parts compile
            raise KeyboardInterrupt
        return mlp(self, x)

    failing.__module__ = LlamaMLP.__module__
    monkeypatch.setattr(LlamaMLP, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        model.generate(IDS, **GREEDY)
    assert changed_forwards(model) == PATCHED


def test_other_threads_run_the_model_as_it_is(fake: FakeGraphs, backend: Backend):
    model = tiny_llama()
    seen: list[Any] = []

    def noting(function: Any) -> Any:
        return lambda *args, **kwargs: seen.append(function) or function(*args, **kwargs)

    with compiled_parts._changed(model, noting), torch.no_grad():
        thread = threading.Thread(target=lambda: model(IDS))
        thread.start()
        thread.join()
        assert not seen
        model(IDS)
        assert seen


@pytest.mark.slow
def test_threads_change_over_while_others_generate(fake: FakeGraphs, backend: Backend):
    prompts = [random_ids(1 + i % 2, 60 + 10 * (i % 3), seed=i) for i in range(9)]
    eager, model = model_of("eager"), model_of()
    want = [eager.generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda ids: model.generate(ids, **GREEDY), prompts))
    assert all(map(torch.equal, got, want)) and changed_forwards(model) == PATCHED
    model.generate(prompts[0], **GREEDY)
    assert path(model) == ALL


class OwnNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


class Adapter(torch.nn.Linear):
    pass


def own_norm(model: PreTrainedModel) -> None:
    model.model.norm = OwnNorm(64).eval()


def hooked_mlp(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def hooked_linear(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda *_: None)


def adapter(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj = Adapter(64, 96, bias=False).eval()


def own_forward(model: PreTrainedModel) -> None:
    module = model.model.layers[0].self_attn
    module.forward = module.forward


def training(model: PreTrainedModel) -> None:
    model.model.layers[1].input_layernorm.train()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (own_norm, ("norms", "norm")),
        (hooked_mlp, ("MLPs", "layers.0.mlp")),
        (hooked_linear, ("MLPs", "layers.0.mlp")),
        (adapter, ("MLPs", "layers.0.mlp")),
        (own_forward, ("RoPE", "layers.0.self_attn")),
        (training, ("norms", "layers.1.input_layernorm")),
    ],
)
def test_changed_modules_are_left_alone(change: Any, left: tuple[str, str]):
    def found(model: PreTrainedModel) -> set[tuple[str, str]]:
        names = {module: name for name, module in model.model.named_modules()}
        return {(part.kind, names[part.module]) for part in parts_of(model)}

    model = tiny_llama()
    everything = found(model)
    assert len(everything) == 5 + 2 + 2
    change(model)
    assert found(model) == everything - {left}


def test_a_replaced_rope_is_left_alone(monkeypatch):
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    assert {part.kind for part in parts_of(tiny_llama())} == {"norms", "MLPs"}


def test_a_model_that_nobody_uses_is_gone_at_once(fake: FakeGraphs, backend: Backend):
    model = model_of("fused")
    gc.collect()
    gc.disable()
    try:
        cache = model.generate(IDS, return_dict_in_generate=True, **GREEDY).past_key_values
        assert path(model) == ALL
        left = weakref.ref(model), weakref.ref(model.model.norm.weight)
        del model
        assert [ref() for ref in left] == [None, None]
        del cache
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compiled_norms_and_mlps_are_bit_identical(no_grad):
    """In bf16, where each operation rounds. RoPE may differ by a rounding."""
    model = tiny_llama().to(torch.bfloat16)
    parts, ids = CompiledParts(model), random_ids(1, 1)
    calls: list[tuple[Any, Any]] = []

    def compared(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            calls.append((function.__qualname__, (parts._compiled[function](*args, **kwargs), out)))
            return out

        return call

    assert parts.compile(input_ids=ids)[1] is None
    with compiled_parts._changed(model, compared):
        model(input_ids=ids)
    assert len(calls) == 5 + 2 + 2
    for name, pair in calls:
        if "rotary" in name:
            for got, want in zip(*pair, strict=True):
                torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)  # two roundings of bf16
        else:
            assert torch.equal(*pair), name
