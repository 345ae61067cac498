"""The captured step on a GPU: tokens of eager, fixed memory, reuse, release. What needs none is in test_decode.py."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fake_graphs import path
from helpers import Case, case_id, cases, random_ids, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

from qattn_hf import QAttnCache, UnsupportedError, patch, release, unpatch
from qattn_hf.generate.cuda_graph import graph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=40)
MIB = 2**20


class Memory(StoppingCriteria):
    """Notes after every step what torch has reserved and where the cache's tensors are; never stops."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.reserved, self.addresses = model, [], []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.reserved.append(torch.cuda.memory_reserved())
        self.addresses.append([t.data_ptr() for t, _ in self.model._qattn.last.cache.state_tensors().values()])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that each capture took."""
    found: list[float] = []
    record = graph.record

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        out = record(*args)
        found.append(time.perf_counter() - start)
        return out

    monkeypatch.setattr(graph, "record", timed)
    return found


def padded(rows: int = 3, tokens: int = 70) -> dict[str, torch.Tensor]:
    ids, mask = random_ids(rows, tokens), torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :9] = ids[0, :9] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_200_replays(case: Case, captures: list[float]):
    model, inputs = tiny_llama().cuda(), padded()
    want = patch(model, case[0], **case[1], decode="eager").generate(**inputs, do_sample=False, max_new_tokens=202)
    assert path(model) == ("eager", None)
    patch(model, case[0], **case[1])
    watched = Memory(model)
    got = model.generate(**inputs, do_sample=False, max_new_tokens=202, stopping_criteria=[watched])
    assert path(model) == ("graph", None) and len(captures) == 1
    assert torch.equal(got, want)
    assert all(found == watched.addresses[1] for found in watched.addresses[1:])
    grown = [a - b for a, b in zip(watched.reserved[4:], watched.reserved[3:], strict=False)]
    print(f"capture {captures[0]:.3f} s, {sum(grown)} bytes reserved over 198 replays")
    assert sum(grown) <= 2 * MIB, "only what generate itself concatenates may need another small segment"
    assert captures[0] < 1
    again = model.generate(**inputs, do_sample=False, max_new_tokens=202, stopping_criteria=[watched])
    if "memory" in case[1]:  # whose tensors change their sizes, so none are kept for the next call
        assert torch.equal(again, want) and len(captures) == 2
        return
    assert torch.equal(again, want) and len(captures) == 1, "the second call replays at once"
    assert watched.addresses[-1] == watched.addresses[1]


@pytest.mark.parametrize("call", [{"num_beams": 4}, {"prompt_lookup_num_tokens": 5}], ids=["beams", "drafts"])
@pytest.mark.parametrize("method", ["turbo", "int8", "kivi", "sinkq", "turboquant"])
def test_beams_and_drafts_are_captured(method: str, call: dict[str, Any], captures: list[float]):
    model, inputs = tiny_llama().cuda(), padded(1) if "prompt_lookup_num_tokens" in call else padded()
    runs = dict(do_sample=False, max_new_tokens=100, **call)
    want = patch(model, method, decode="eager").generate(**inputs, **runs)
    assert path(model) == ("eager", None)
    patch(model, method)
    for _ in range(2):
        got = model.generate(**inputs, **runs)
        assert path(model) == ("graph", None) and torch.equal(got, want)
    assert captures and max(captures) < 1


def test_a_draft_models_steps_are_captured(captures: list[float]):
    inputs, runs = padded(1), dict(do_sample=False, max_new_tokens=100)
    found = []
    for decode in ("eager", "graph"):
        model, draft = (patch(tiny_llama().cuda(), method, decode=decode) for method in ("turbo", "int8"))
        draft.generation_config.assistant_confidence_threshold = 0.0  # else random weights draft one token a round
        found.append(model.generate(**inputs, assistant_model=draft, **runs))
    assert torch.equal(*found) and len(captures) > 1


@pytest.mark.parametrize("method", ["turbo", "kivi", "sinkq"])
def test_compiled_steps_are_captured(method: str, captures: list[float]):
    model, inputs = tiny_llama().cuda(), padded()
    want = patch(model, method, decode="eager").generate(**inputs, do_sample=False, max_new_tokens=140)
    patch(model, method, decode="compile")
    for _ in range(2):
        got = model.generate(**inputs, do_sample=False, max_new_tokens=140)
        assert path(model) == ("compile", None) and len(captures) == 1
        assert torch.equal(got, want)
    few = {name: x[:2] for name, x in inputs.items()}
    assert model.generate(**few, **GREEDY).shape[0] == 2 and len(captures) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decode", "first"), [("fused", 3), ("auto", 8)])
def test_compiled_parts(decode: str, first: int, dtype: torch.dtype, captures: list[float], monkeypatch: Any):
    """`first` is the first step with compiled parts. Up to there all bits are equal, so it has equal inputs."""
    monkeypatch.setitem(graph.FUSE_AFTER, "auto", 5)
    model, inputs, found = tiny_llama(num_hidden_layers=8, hidden_size=256).cuda().to(dtype), padded(), []
    for how in ("graph", decode):
        patch(model, "none", decode=how)
        found.append(model.generate(**inputs, output_logits=True, return_dict_in_generate=True, **GREEDY).logits)
    assert path(model) == ("fused", "norms, MLPs and RoPE compiled")
    plain, fused = found
    assert all(torch.equal(a, b) for a, b in zip(plain[:first], fused[:first], strict=True))
    change = ((plain[first] - fused[first]).norm() / plain[first].norm()).item()
    print(f"logits change by {change:.1e}; captures of {captures} s")
    assert change < 16 * torch.finfo(dtype).eps, "RoPE may round queries and keys otherwise, in each of eight layers"
    assert len(captures) == (2 if decode == "fused" else 3) and len(model._qattn.pool.graphs) == 1
    model.generate(**inputs, **GREEDY)
    assert len(captures) <= 3 and path(model)[0] == "fused", "the second call replays at once"


def test_lengths_and_batches_share_one_pool(captures: list[float]):
    """Steps of several arenas are replayed in any order, though their graphs share memory."""
    model = patch(tiny_llama().cuda(), "turbo", decode="eager")
    prompts = [padded(rows, tokens) for rows, tokens in ((3, 70), (1, 300), (3, 70), (2, 20), (1, 300), (3, 75))]
    want = [model.generate(**inputs, **GREEDY) for inputs in prompts]
    patch(model, "turbo")
    got = [model.generate(**inputs, **GREEDY) for inputs in prompts]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(captures) == 3 and len({g.pool() for g in model._qattn.pool.graphs}) == 1


def test_outputs_and_sampling_are_those_of_eager():
    model, inputs = tiny_llama().cuda(), padded()
    found = []
    for decode in ("eager", "graph"):
        patch(model, "turbo", decode=decode)
        torch.manual_seed(0)
        wanted = dict(output_logits=True, output_hidden_states=True, return_dict_in_generate=True)
        found.append(model.generate(**inputs, do_sample=True, max_new_tokens=40, **wanted))
        assert path(model) == (decode, None)
    eager, graphed = found
    assert torch.equal(eager.sequences, graphed.sequences)
    assert all(torch.equal(a, b) for a, b in zip(eager.logits, graphed.logits, strict=True))
    for a, b in zip(eager.hidden_states, graphed.hidden_states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_held_cache_and_a_second_turn(captures: list[float]):
    model, inputs = patch(tiny_llama().cuda(), "turbo"), padded()
    first = model.generate(**inputs, return_dict_in_generate=True, **GREEDY)
    held = {name: t.clone() for name, (t, _) in first.past_key_values.state_tensors().items()}
    model.generate(**padded(), **GREEDY)
    assert all(torch.equal(held[name], t) for name, (t, _) in first.past_key_values.state_tensors().items())
    more = torch.cat([first.sequences, first.sequences[:, 20:60]], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, more.shape[1] - 70), value=1)
    got = model.generate(more, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY)
    patch(model, "turbo", decode="eager")
    start = model.generate(**inputs, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(start.sequences, first.sequences)
    want = model.generate(more, attention_mask=mask, past_key_values=start.past_key_values, **GREEDY)
    assert torch.equal(got, want)


@pytest.mark.parametrize("how", [release, unpatch])
def test_memory_comes_back(how: Any):
    model, inputs = tiny_llama().cuda(), padded(16)
    patch(model, "none").generate(**inputs, **GREEDY)  # loads what torch and cuBLAS keep for good
    how(model)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    patch(model, "none")
    cache = QAttnCache.for_model(model, max_cache_len=30_000)
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    del cache
    held = torch.cuda.memory_allocated() - before[0]
    assert path(model) == ("graph", None) and held > 200 * MIB
    how(model)
    left = torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]
    print(f"{held / MIB:.0f} MiB held, {left[0] / MIB:.1f} left, {left[1] / MIB:.1f} more reserved than before")
    assert left[0] < 1 * MIB and left[1] < 64 * MIB


class Waits(torch.nn.Module):
    """A layer that asks the device, in a way the watch sees or in one that only the capture finds."""

    def __init__(self, inner: torch.nn.Module, hidden: bool):
        super().__init__()
        self.inner, self.hidden = inner, hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden:
            torch.cuda.current_stream().synchronize()
            return self.inner(x)
        return self.inner(x) if x.abs().max().item() < 1e9 else x


@pytest.mark.parametrize("hidden", [False, True], ids=["seen by the watch", "found by the capture"])
def test_a_model_that_waits(hidden: bool):
    model, inputs = tiny_llama().cuda(), padded()
    model.model.layers[1].mlp = Waits(model.model.layers[1].mlp, hidden)
    want = patch(model, "turbo", decode="eager").generate(**inputs, **GREEDY)
    torch.manual_seed(0)
    sampled = model.generate(**inputs, do_sample=True, max_new_tokens=40)
    patch(model, "turbo")
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    print(path(model))
    assert path(model)[0] == "eager"
    torch.manual_seed(0)  # a spoilt capture must not spoil torch's generator
    assert torch.equal(model.generate(**inputs, do_sample=True, max_new_tokens=40), sampled)
    with pytest.raises(UnsupportedError, match="decode='graph'"):
        patch(model, "turbo", decode="graph").generate(**inputs, **GREEDY)
    model.model.layers[1].mlp = model.model.layers[1].mlp.inner
    assert torch.equal(model.generate(**inputs, **GREEDY), want) and path(model) == ("graph", None)


def test_experts(captures: list[float]):
    """Experts are captured if transformers routes them on the device. The tokens equal eager ones in any case."""
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    experts = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **sizes, **experts, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    model, inputs = AutoModelForCausalLM.from_config(config).eval().cuda(), padded()
    want = patch(model, "turbo", decode="eager").generate(**inputs, **GREEDY)
    assert torch.equal(patch(model, "turbo").generate(**inputs, **GREEDY), want)
    print(path(model))
