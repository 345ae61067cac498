"""`qattn plan`: what it says from a config alone is what weights, caches and calls allocate."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICE, random_ids, tiny_llama
from small_types import SHARED_KEYS, in_packed_cache, tiny
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig

from qattn_hf import QAttnError, UnsupportedError, patch
from qattn_hf.layer.window_layer import WindowLayer
from qattn_hf.methods import get_method
from qattn_hf.model.layer_kinds import WindowLayerSpec
from qattn_hf.model.selection import attending
from qattn_hf.planning import activations
from qattn_hf.planning.cards import CARDS
from qattn_hf.planning.check import without_weights
from qattn_hf.planning.live_memory import LiveMemory
from qattn_hf.planning.plan import ROUNDING, Planner, _largest, _last
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.launch.launches import recorded
from qattn_kernels.launch.plan import _plan
from qattn_kernels.layer.arena import Layout, empty_arena
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.step import Arena, Step
from qattn_kernels.layout import Geometry
from qattn_kernels.step.operator import compute

MIB = 2**20


def config_of(**changes: Any) -> LlamaConfig:
    """A small Llama whose heads the kernels know."""
    sizes = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=3)
    config: LlamaConfig = tiny_llama(**{**sizes, **changes}).config
    config.dtype = torch.float32
    return config


def allocated(run: Callable[[], Any]) -> int:
    """Most bytes that PyTorch's allocator on the CPU had given out at once during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = run()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2048), (3, 500)])
def test_activations_are_what_a_prompt_allocates(rows, tokens):
    """Of a stock model on a CPU, where the allocator itself is asked."""
    model, ids = tiny_llama(num_hidden_layers=3), random_ids(rows, tokens)

    @torch.no_grad()
    def prompt() -> DynamicCache:
        cache, positions = DynamicCache(), torch.arange(tokens).expand(rows, tokens).contiguous()
        logits = model(ids.clone(), past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
        logits[:, -1].to(copy=True, dtype=torch.float32).argmax(-1)
        return cache

    prompt()  # what is allocated once, such as a constant of the rotary embedding
    kept = prompt()
    measured = allocated(prompt) - sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    config = model.config
    config.dtype = torch.float32
    shadow = without_weights(config)
    with attending(shadow, activations.register()):
        layers = [activations.CountedLayer(Geometry(rows, 2, 16, 16, 1, torch.float32), None, {}) for _ in range(3)]
        live = LiveMemory()
        activations.run(shadow, layers, tokens, 0, live)
    predicted = live.peak - sum(tensor.nbytes for layer in layers for tensor in layer.stock.values())
    assert predicted == pytest.approx(measured, rel=0.02)  # attention on a CPU needs additional working memory


@pytest.mark.gpu
@pytest.mark.product
@pytest.mark.parametrize(("tokens", "past"), [(130, 0), (130, 128), (1, 128)], ids=["prompt", "later prompt", "step"])
@pytest.mark.parametrize("method", ["turbo", "kivi:bits=4", "sinkq", "sage2", "sage2:smooth_q=block", "turboquant"])
def test_the_attention_allocates_what_is_predicted(method, tokens, past):
    name, settings = split_method(method)
    spec = replace(get_method(name)(**settings).last_layer_spec(1), impl="triton")
    layout = Layout(Geometry(2, 1, 64, 64, 512 // spec.window.block, torch.float32), spec)
    blocks, found, later = -(-past // spec.window.block), [], []
    for device in (torch.device(DEVICE), torch.device("meta")):
        unused = empty_arena(layout, device)
        arena = unused.clone()
        q, k, v = (torch.zeros(2, heads, tokens, 64, device=device) for heads in (2, 1, 1))
        span = torch.tensor([[0, tokens]] * 2, dtype=torch.int32).to(device)
        call = partial(compute, Step(q, k, v, span, Arena(arena, layout, ""), Scores(0.125), blocks))
        recorded(call, collects=device.type == "meta")  # makes what a device keeps for good, such as a rotation's signs
        arena.copy_(unused)  # `past` bounds what an unused arena has closed, not what the first call closed
        with LiveMemory() as live:
            results, recorder = recorded(call, collects=device.type == "meta")  # as the first call of a shape
        found.append(live.peak)
        if device.type == "meta":
            later.append(activations.Planned.of(results, recorder.allocated))
        elif recorder.foreign is None:
            later.append(_plan(recorder, (arena, q, k, v, span), results))
    assert found[1] == pytest.approx(found[0], rel=0.02)  # GPUs differ in how many parts a step has
    if len(later) == 2:  # what later calls allocate
        of_gpu, predicted = ([(x.size, x.dtype) for x in one.results] for one in later)
        assert predicted == of_gpu
        assert later[1].temporary == pytest.approx(later[0].temporary, rel=0.02)


@pytest.mark.parametrize(
    "method", ["turbo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kivi:bits=4", "int8", "sinkq"))]
)
def test_weights_and_cache_are_what_generate_allocates(method):
    config = config_of()
    model = patch(tiny_llama(**config.to_diff_dict()).float(), method)
    out = model.generate(random_ids(2, 200), max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    layers = out.past_key_values.layers
    planner = Planner(config)
    memory = planner.memory(planner.way(method), batch=2, context=208)  # the last token is not cached
    arenas = sum(layer.arena.nbytes for layer in layers)
    assert arenas <= memory.cache < arenas + len(layers) * ROUNDING
    own = [*model.parameters(), *model.buffers()]
    exact = sum(x.nbytes for x in own)
    assert exact <= memory.weights < exact + len(own) * ROUNDING


OF_KERNELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 64},
    "mistral": {"head_dim": 64},
    "gemma4_text": {"head_dim": 64, "global_head_dim": 64, "num_hidden_layers": 6, **SHARED_KEYS},
}


@pytest.mark.parametrize("tokens", [pytest.param(300, marks=pytest.mark.slow), 900])
@pytest.mark.parametrize(
    ("family", "sliding"),
    [
        ("gemma3_text", "packed"),
        ("gemma4_text", "packed"),
        ("gemma4_text", "exact"),
        pytest.param("mistral", "packed", marks=pytest.mark.slow),
    ],
)
def test_packed_windows_are_counted_as_generate_allocates_them(family, sliding, tokens, monkeypatch):
    """By the recipe's `sliding`; below what a window takes at most, and beyond it. Layers that share keys hold none."""
    in_packed_cache(monkeypatch)
    config, method = tiny(family, **OF_KERNELS[family]).config, f"int8:sliding={sliding}"
    model = patch(tiny(family, **OF_KERNELS[family]), method)
    how = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    layers = model.generate(random_ids(2, tokens - 8), **how).past_key_values.packed
    planner = Planner(config)
    memory = planner.memory(planner.way(method), batch=2, context=tokens)
    arenas = sum(layer.arena.nbytes for layer in layers)
    assert arenas <= memory.cache < arenas + len(layers) * ROUNDING
    longer = planner.memory(planner.way(method), batch=2, context=tokens + 640)
    grown = [Layout(layer.geometry, layer.spec) for layer in layers if not isinstance(layer, WindowLayer)]
    assert (longer.cache > memory.cache) == bool(grown or tokens == 300)
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match=r"sliding window of 20.*sliding='packed'.*qattn doctor"):
        planner.way("int8:decode=eager")
    with pytest.raises(UnsupportedError, match="full attention is planned"):
        planner.way("full")


@pytest.mark.gpu
@pytest.mark.product("later prompt")
@pytest.mark.parametrize(("tokens", "past"), [(500, 0), (200, 300), (1, 448)], ids=["prompt", "later prompt", "step"])
def test_a_packed_window_allocates_what_is_predicted(monkeypatch, tokens, past):
    """The text exceeds the capacity of 448 tokens, so the layer grows or moves blocks to the front."""
    spec = get_method("int8")().last_layer_spec(1)
    spec = WindowLayerSpec(**(vars(spec) | {"impl": "triton"}), sliding_window=20)
    layer = WindowLayer(spec)
    layer.plan(1000)

    def run(step: Step) -> Any:  # inside of an operator nothing is counted
        return recorded(partial(compute, step), collects=False)[0]

    monkeypatch.setattr("qattn_hf.layer.layer.attend_step", run)
    monkeypatch.setattr("qattn_hf.layer.window_layer.attend_step", run)

    def heads(tokens: int, device: str) -> list[torch.Tensor]:
        return [torch.zeros(1, heads, tokens, 64, device=device) for heads in (2, 1, 1)]

    q, k, v = heads(past, DEVICE)
    handle = layer.update(k, v)[0]
    if past:
        layer.attend(q, handle, torch.tensor([[0, past]], dtype=torch.int32, device=DEVICE), Scores(0.125))
    span, (q, k, v) = torch.tensor([[0, tokens]], dtype=torch.int32, device=DEVICE), heads(tokens, DEVICE)
    counted = activations.CountedLayer(layer.geometry, spec, {})
    counted.past = past
    with LiveMemory() as live:
        layer.attend(q, layer.update(k, v)[0], span, Scores(0.125), unpadded=True)
    q, k, v = heads(tokens, "meta")
    with LiveMemory() as predicted:
        counted.attend(q, counted.update(k, v)[0], 0.125, {})
    assert predicted.peak == pytest.approx(live.peak, rel=0.02)  # GPUs differ in how many parts a step has


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_counted_once(tied):
    config = config_of(tie_word_embeddings=tied)
    model = tiny_llama(**config.to_diff_dict())
    own = [*model.parameters(), *model.buffers()]
    exact = sum(x.nbytes for x in own)
    assert exact <= Planner(config).weight_bytes < exact + len(own) * ROUNDING
    assert Planner(config, dtype=torch.bfloat16).weight_bytes < 0.6 * exact


def test_experts_are_counted():
    from transformers import MixtralConfig

    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=97)
    planner = Planner(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4, sliding_window=None))
    memory = planner.memory(planner.way("turbo"), 1, 1024)
    assert memory.activations > 2 * 1024 * 256 * 2  # two experts a token, one intermediate tensor of each in bf16


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "turbo"])
def test_the_longest_context_fits_and_a_longer_one_does_not(method):
    planner = Planner(config_of(), fixed=0)
    way = planner.way(method)
    tokens = planner.longest(64 * MIB, way, 3)
    assert planner.fits(64 * MIB, way, 3, tokens)
    assert not planner.fits(64 * MIB, way, 3, int(tokens * 1.01) + 64)
    assert planner.memory(way, 3, tokens).total < 1.1 * 64 * MIB, "without a limit more is kept"
    rows = planner.largest(64 * MIB, way, 1000)
    assert planner.fits(64 * MIB, way, rows, 1000) and not planner.fits(64 * MIB, way, rows + 1, 1000)
    assert planner.longest(planner.weight_bytes, way) == planner.largest(planner.weight_bytes, way, 64) == 0


@pytest.mark.slow
def test_smaller_chunks_leave_more_for_the_cache():
    whole, cut = Planner(config_of(), fixed=0), Planner(config_of(), fixed=0, prefill_chunk_size=512)
    longest = whole.longest(64 * MIB, whole.way("turbo"))
    assert cut.fits(64 * MIB, cut.way("turbo"), 1, int(1.5 * longest))
    assert not whole.fits(64 * MIB, whole.way("full"), 1, longest)
    uncut, parts = (planner.memory(planner.way("turbo"), 1, 5000) for planner in (whole, cut))
    assert parts.activations < uncut.activations / 3
    full = [planner.memory(planner.way("full"), 1, 5000) for planner in (whole, cut)]
    assert full[0] == full[1], "transformers does not cut by itself"
    assert parts.total == parts.weights + parts.cache + parts.activations + parts.fixed


@pytest.mark.parametrize("slope", [1, 7, 1000])
@pytest.mark.parametrize("memory", [0, 5, 10_000, 123_456_789])
def test_the_search_finds_the_last_that_fits(slope, memory):
    asked: list[int] = []

    def total(n: int) -> int:
        asked.append(n)
        return 40 + slope * n + (n > 500) * 3000 * (n - 500)  # dearer from there on

    found = _largest(total, memory)
    assert (found == 0 or total(found) <= memory) and total(found + 1) > memory
    assert len(asked) < 60
    near = _largest(total, memory, parts=100)
    assert near <= found <= near * 1.011


@pytest.mark.parametrize("most", [0, 1, 5, 1000, 123_456])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99, 1.0])
def test_the_last_that_fits_is_found_from_above(most, share):
    last, asked = int(share * most), []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= last

    assert _last(fits, most, None) == last and len(asked) < 25
    assert 0 <= last - _last(fits, most, 100) <= max(1, most // 100)


def test_what_cannot_be_planned():
    planner = Planner(config_of())
    with pytest.raises(UnsupportedError, match="qattn doctor says why"):
        planner.way("turbo:block_kv=32")
    with pytest.raises(UnsupportedError, match="packs nothing"):
        planner.way("sage2:cache=model")
    hybrid = Planner(tiny("qwen3_next").config)
    with pytest.raises(UnsupportedError, match=r"linear attention or SSM.*qattn doctor counts"):
        hybrid.way("turbo")
    with pytest.raises(UnsupportedError, match="latent attention"):
        Planner(tiny("deepseek_v3").config)
    quantized = config_of()
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(QAttnError, match="--weights 16GiB"):
        Planner(quantized)
    assert Planner(quantized, weight_bytes=5 * MIB).weight_bytes == 5 * MIB


@pytest.mark.slow
def test_the_check_on_a_gpu_runs_below_the_plan_and_above_it(monkeypatch):
    """There `run` generates; here contexts up to a share of the planned one run."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "eval")
    check = importlib.import_module("plan_check")
    planner = Planner(config_of(), fixed=0)
    way, limit = planner.way("turbo"), 64 * MIB
    planned = planner.longest(limit, way)
    memory = functools.cache(lambda context: Planner.memory(planner, way, 1, context))
    fits = functools.cache(lambda context: Planner.fits(planner, limit, way, 1, context))
    monkeypatch.setattr(planner, "longest", lambda *_: planned)
    monkeypatch.setattr(planner, "memory", lambda *call: memory(call[-1]))
    monkeypatch.setattr(planner, "fits", lambda *call: fits(call[-1]))
    for reach, within in ((1.0, True), (0.9, False), (1.1, False)):
        monkeypatch.setattr(check, "run", lambda *call, reach=reach: {"ran": call[2] <= reach * planned})
        row = check.checked(None, planner, way, limit, 1)
        assert row["planned"] == planned and row["within"] == within
        for one in row["runs"]:
            predicted = one["predicted"]
            assert predicted["fits"] == (one["context"] <= planned)
            assert one["measured"]["ran"] == (one["share"] <= reach)
            assert 0 < predicted["cache"] < predicted["allocated"] < predicted["reserved"] < 1.15 * limit


@pytest.fixture
def qattn(qattn):
    return partial(qattn, "plan")


@pytest.fixture
def folder(tmp_path):
    config_of().save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_command_prints_what_the_planner_says(qattn, folder, monkeypatch):
    said = []

    def answer(planner: Planner, memory: int, way: Any, n: int) -> int:
        said.append((memory, way.name, n, planner.dtype, planner.prefill_chunk_size))
        return 64 * n * (1 if way.name == "full" else 4)

    monkeypatch.setattr(Planner, "longest", answer)
    monkeypatch.setattr(Planner, "largest", answer)
    asked = (folder, "--gpu-memory", "800MiB", "--method", "turbo,turbo:block_kv=32", "--context", "1000")
    code, out, _ = qattn(*asked, "--batch", "2", "--dtype", "float16", "--prefill-chunk-size", "512", "--json")
    data = json.loads(out)
    planner = Planner(config_of(), dtype=torch.float16, prefill_chunk_size=512)
    assert code == 0 and data["gpu_memory"] == 800 * MIB and data["weights"] == planner.weight_bytes
    how = (torch.float16, 512)
    assert said == [(800 * MIB, method, n, *how) for method in ("full", "turbo") for n in (2, 1000)]
    full, turbo, refused = data["rows"]
    assert (full["longest"], full["largest"]) == ({"2": 128}, {"1000": 64000})
    assert (turbo["longest"], turbo["largest"]) == ({"2": 512}, {"1000": 256000})
    assert turbo["memory"] == vars(planner.memory(planner.way("turbo"), 2, 512))
    assert refused["method"] == "turbo:block_kv=32" and "qattn doctor" in refused["not_planned"]
    code, out, _ = qattn(*asked)
    assert code == 0 and "turbo" in out and "rows of 1000" in out and "turbo:block_kv=32: " in out


def test_the_commands_errors(qattn, folder, monkeypatch):
    code, out, err = qattn(folder, "--gpu-memory", "12 parsecs")
    assert code == 2 and not out and "24GiB" in err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = qattn(folder)
    assert code == 2 and not out and "--gpu-memory" in err
    code, out, err = qattn(folder, "--gpu-memory", "1GiB", "--method", "turbot")
    assert code == 2 and not out and "turbot" in err


def test_a_card_has_its_memory_and_its_kernels(qattn, folder, monkeypatch):
    """An FP8 product needs the kernels of a later card than the RTX 3090."""
    monkeypatch.setattr(Planner, "longest", lambda *_: 64)
    monkeypatch.setattr(Planner, "largest", lambda *_: 1)
    asked = (folder, "--method", "sage2", "--json", "--gpu")
    found = {card: json.loads(qattn(*asked, card)[1]) for card in ("rtx-3090", "l4")}
    assert found["l4"]["gpu_memory"] == CARDS["l4"].memory_bytes < found["rtx-3090"]["gpu_memory"]
    assert {card: "not_planned" in data["rows"][1] for card, data in found.items()} == {"rtx-3090": True, "l4": False}
    assert json.loads(qattn(*asked, "l4", "--gpu-memory", "1GiB")[1])["gpu_memory"] == 2**30


def test_a_model_of_which_nothing_is_planned_gets_the_reasons(qattn, tmp_path):
    """Its windows stay unpacked for every method and in full precision."""
    tiny("gemma3_text", **OF_KERNELS["gemma3_text"]).config.save_pretrained(tmp_path)
    ways = "int8:decode=eager,turbo:decode=eager"
    asked = (str(tmp_path), "--gpu-memory", "1GiB", "--method", ways)
    code, out, err = qattn(*asked)
    assert code == 1 and not out and err.count("qattn doctor") == 2
    assert "none of the methods can be planned" in err and "full: " in err and f"{ways.replace(',', ', ')}: " in err
    code, out, err = qattn(*asked, "--json")
    assert code == 1 and [row["method"] for row in json.loads(out)["rows"]] == ["full", *ways.split(",")] and err
