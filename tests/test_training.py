"""A patched model inside a training loop: calls that train attend as before `patch`, and rollouts pack."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpo
import pytest
import torch
from helpers import random_ids, tiny_llama
from refusals import ONE, SIZES, llava, logits, refused, same, state, tiny
from training_tables import TABLES
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from qattn_hf import QAttnCache, QAttnError, UnsupportedError, patch, report, unpatch

IDS = random_ids(2, 70)
SAMPLED = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
WINDOWED = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def latent() -> PreTrainedModel:
    """A DeepSeek-V3, whose modules `patch` changes."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    rest = {"qk_rope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, **experts, **rest)).eval()


MODELS = {
    "sdpa": tiny,
    "eager": lambda: tiny(attn_implementation="eager"),
    "windows": lambda: tiny("gemma3_text", **WINDOWED),
    "latent": latent,
    "llava": llava,
}


def step(model: PreTrainedModel, **how: Any) -> list[torch.Tensor]:
    """The loss of one call and the gradients of all weights."""
    model.zero_grad()
    loss = model(ONE, labels=ONE, **how).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 1 and all(map(torch.equal, a, b))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step_is_that_of_the_unpatched_model(kind: str, checkpointing: bool):
    model = MODELS[kind]().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    want = step(model)
    patch(model, "int8")
    assert equal(step(model), want)
    model.generate(ONE, max_new_tokens=3)
    assert model.training and report(model).to_dict()["packed_tokens"], "a rollout between two steps packs"
    assert equal(step(model), want)
    assert equal(step(unpatch(model)), want)


def test_adapters_of_peft_train():
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(), config).train()
    want = step(model)
    inner = patch(model.base_model.model, "int8")
    assert equal(step(model), want) and len(want) == 9, "a loss, and two weights for each of two layers' two modules"
    model.generate(input_ids=ONE, max_new_tokens=3)
    assert report(inner).to_dict()["packed_tokens"] and model.training
    assert equal(step(model), want)


@pytest.mark.slow
def test_a_compiled_step_trains():
    model = tiny().train()
    want = step(model)
    patch(model, "int8")
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        loss = compiled(ONE, labels=ONE).loss
        loss.backward()
        assert equal([loss.detach(), *(p.grad for p in model.parameters())], want)
        model.generate(ONE, max_new_tokens=2)


def test_a_method_over_stock_caches_trains_too():
    model = tiny().train()
    want = step(model)
    assert equal(step(patch(model, "sage2", cache="model")), want)
    model.generate(ONE, max_new_tokens=3)
    assert equal(step(model), want)


def test_generate_in_training_mode_gives_the_packed_tokens_of_eval_mode():
    model = patch(tiny_llama(attention_dropout=0.5), "turbo")
    want = model.generate(IDS, **SAMPLED)
    model.train()
    frozen = model.model.layers[0].eval()
    got = model.generate(IDS, **SAMPLED)
    assert torch.equal(got.sequences, want.sequences)
    assert all(map(torch.equal, got.logits, want.logits)), "dropout is off"
    assert model.training and model.model.layers[1].training and not frozen.training


def test_a_model_that_no_variable_holds_generates_and_others_train_on():
    want = patch(tiny(), "turbo").generate(ONE, max_new_tokens=3)
    other = tiny().train()
    kept: list[bool] = []
    other.register_forward_hook(lambda module, *_: kept.append(module.training))
    other.generate(ONE, max_new_tokens=2)
    assert all(kept) and kept, "a model without a patch stays in training mode in generate"
    assert torch.equal(want, patch(other.eval(), "turbo").generate(ONE, max_new_tokens=3))


@pytest.mark.parametrize("way", ["generate", "generate_batch"])
def test_training_mode_is_restored_after_an_exception(way: str):
    model = patch(tiny(), "turbo").train()
    with pytest.raises((UnsupportedError, TypeError)):
        getattr(model, way)(ONE, **({"cache_implementation": "static"} if way == "generate" else {"inputs": 1}))
    assert all(module.training for module in model.modules())


def test_generate_batch_in_training_mode():
    model = patch(tiny(), "int8")
    prompts = [row.tolist() for row in IDS]

    def answers() -> list[list[int]]:
        found = model.generate_batch(prompts, max_new_tokens=4, progress_bar=False)
        return [found[name].generated_tokens for name in sorted(found)]

    want = answers()
    model.train()
    assert answers() == want and len(want) == 2
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("direct", [False, True], ids=["call", "forward"])
def test_calls_in_training_mode_without_gradients_are_in_full_precision(direct: bool):
    model = tiny()
    with torch.no_grad():
        want = logits(model)
        patch(model, "turbo")
        packed = model(ONE[:, :1], past_key_values=model(ONE[:, 1:]).past_key_values).logits
        model.train()
        assert torch.equal((model.forward if direct else model)(ONE).logits, want)
        model.eval()
        again = model(ONE[:, :1], past_key_values=model(ONE[:, 1:]).past_key_values).logits
    assert torch.equal(again, packed)


def test_gradients_in_eval_mode_without_a_cache():
    model = tiny()
    want = step(model, use_cache=False)
    patch(model, "turbo")
    with pytest.warns(UserWarning, match="use_cache=False with gradients: this call attends in full precision"):
        assert equal(step(model, use_cache=False), want)
    with torch.no_grad():
        output = model(ONE)
    assert isinstance(output.past_key_values, QAttnCache)
    with pytest.raises(UnsupportedError, match=r"has no gradient: .*model\.train\(\) or pass use_cache=False"):
        step(model)


@pytest.mark.parametrize(
    ("direct", "settings"),
    [(False, {"method": "turbo"}), (True, {"method": "turbo"}), (False, {"method": "sage2", "cache": "model"})],
    ids=["call", "forward", "stock"],
)
def test_the_report_says_that_the_last_call_was_in_full_precision(direct: bool, settings: dict[str, Any]):
    model = patch(tiny(), **settings)

    def reported(call: Callable[[], Any]) -> str | None:
        call()
        told = report(model)
        reason = told.to_dict()["unpacked_call"]
        said = f"the last call attended in full precision, as before patch: {reason}"
        assert (said in " ".join(str(told).split())) == (reason is not None)
        return reason

    def one(**how: Any) -> None:
        (model.forward if direct else model)(ONE, **how)

    rollout = partial(model.generate, ONE, max_new_tokens=2)
    assert reported(rollout) is None
    model.train()
    assert reported(one) == "the model is in training mode"
    assert reported(rollout) is None
    model.eval()
    assert reported(partial(one, use_cache=False)) == "it recorded gradients with use_cache=False"
    with torch.no_grad():
        assert reported(partial(one, use_cache=False)) is None
    assert report(patch(tiny(), **settings)).to_dict()["unpacked_call"] is None


def test_a_packed_cache_in_training_mode_is_refused(patched: PreTrainedModel):
    cache = QAttnCache.for_model(patched)
    patched.train()
    refused(lambda: patched(ONE, past_key_values=cache), UnsupportedError, "training mode", "model.eval()")
    patched.get_decoder().eval()
    refused(lambda: patched(ONE), UnsupportedError, "its decoder is not", "model.train()")
    patched.eval().get_decoder().train()
    refused(lambda: patched(ONE), UnsupportedError, "training mode", "model.eval()")


def test_copies_made_while_the_model_trains_pack_again():
    model = patch(tiny(), "turbo").train()
    step(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(ONE, max_new_tokens=4), model.generate(ONE, max_new_tokens=4))
    assert twin.config._attn_implementation == model.config._attn_implementation == "qattn"


@pytest.mark.slow
def test_the_page_runs_as_written():
    page = (Path(__file__).resolve().parent.parent / "docs" / "training.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(code, names)
    full, packed = names["full"], names["packed"]
    assert full.shape == packed.shape == (4, 8, 1) and not packed.requires_grad
    assert not torch.equal(full, packed), "one is of the packed cache, the other of full precision"
    with torch.no_grad():
        unpacked = unpatch(names["model"])(names["out"].sequences, logits_to_keep=9).logits[:, :-1].log_softmax(-1)
    assert torch.equal(full, unpacked.gather(-1, names["tokens"]))
    assert all(p.grad is not None for p in names["model"].parameters())


def small_grpo(*more: str) -> list[dict[str, Any]]:
    """Rows of two steps on the bundled model."""
    sizes = ["--steps", "2", "--every", "1", "--prompts", "1", "--group", "2", "--shots", "1", "--operations", "1"]
    options = [*sizes, "--new-tokens", "24", "--held-out", "2", *more]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        grpo.main(options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.slow
def test_the_measurement_of_rewards_runs(tmp_path: Path):
    rows = small_grpo("--methods", "bf16;turbo")
    assert [(row["setting"], row.get("step")) for row in rows] == [
        (setting, step) for setting in ("bf16", "turbo") for step in (1, 2, None)
    ]
    assert {row["reward"] for row in rows if "step" in row} <= {0, 0.5, 1}
    assert rows[2]["kl"] < 1e-6, "without a packed cache, sampling and training agree"
    record = {"rows": rows, "command": "", "date": "2026-11-28", "device": "CPU", "versions": {}}
    (tmp_path / "grpo-demo.json").write_text(json.dumps({"name": "grpo-demo", **record}), encoding="utf-8")
    rewards, ends = (table(tmp_path).splitlines() for table in TABLES)
    assert rewards[0] == "| steps | bf16 | turbo |" and rewards[2].startswith("| 1 to 1 | ") and len(rewards) == 4
    assert [line.split(" | ")[0] for line in ends[2:]] == ["| `bf16`", "| `turbo`"]


def test_a_grpo_step_raises_what_was_rewarded_and_truncates_the_ratio():
    model = patch(tiny_llama(), "int8").train()
    ids, new = random_ids(4, 20), torch.ones(4, 5, dtype=torch.bool)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        before = grpo.trained_log_p(model, ids, mask, 5)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = grpo.Rollout(ids, mask, new, before - math.log(3), rewards)
    options = argparse.Namespace(group=2, micro=2)
    figures = grpo.update(model, grpo.Policy(model, 1e-3), found, options)
    assert figures["off"] == pytest.approx(2, rel=1e-4) and figures["kl"] == pytest.approx(2 - math.log(3), rel=1e-4)
    change = (grpo.trained_log_p(model, ids, mask, 5) - before).sum(1)
    assert bool((change[rewards == 1] > 0).all()) and bool((change[rewards == 0] < 0).all())


def test_an_answer_ends_after_an_empty_line_or_the_end_of_the_text():
    pieces = ["a", "\n", "\n\n", "<end>", "b"]
    for tokens, count in (([0, 2, 4], 2), ([0, 1, 1, 4], 3), ([0, 3, 0], 2), ([0, 1, 4, 1], 4)):
        assert grpo.answer_of(tokens, pieces, "<end>")[0] == count


def fused(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step()


def one_by_one(model: PreTrainedModel) -> None:
    last = [*model.model.parameters()][-1]
    last.grad = torch.ones_like(last)
    torch.optim.SGD([last], lr=1e-3, foreach=False).step()


def in_place(model: PreTrainedModel) -> None:
    model.load_state_dict({name: weight + 0.01 for name, weight in model.state_dict().items()})


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("change", [fused, one_by_one, in_place])
def test_a_cache_of_earlier_weights_is_refused(change: Callable[[PreTrainedModel], None], tokens: int, tmp_path: Path):
    model = patch(tiny(), "int8")
    with torch.no_grad():
        kept = model(ONE).past_key_values
        kept.save(tmp_path / "kept")
        model(ONE[:, :tokens], past_key_values=kept)
        before = state(kept)
        change(model)
        parts = "written before the model changed", "its weights were trained", "QAttnCache.for_model(model)"
        refused(lambda: model(ONE[:, :tokens], past_key_values=kept), UnsupportedError, *parts)
        longer = torch.cat([ONE, ONE[:, :tokens], ONE[:, :tokens]], 1)
        refused(lambda: model.generate(longer, past_key_values=kept, max_new_tokens=2), UnsupportedError, *parts)
        refused(lambda: kept.save(tmp_path / "more"), UnsupportedError, "its weights were trained")
        refused(lambda: QAttnCache.load(tmp_path / "kept", model=model), UnsupportedError, "other weights")
        assert same(before, kept)
        kept.reset()
        model(ONE, past_key_values=kept)
        model(ONE[:, :tokens], past_key_values=kept)


def test_an_optimizer_of_another_model_changes_no_cache():
    model, other = patch(tiny(), "int8"), tiny()
    with torch.no_grad():
        kept = model(ONE).past_key_values
        fused(other)
        model(ONE[:, :1], past_key_values=kept)
        model(ONE[:, :9], past_key_values=kept)


@pytest.mark.parametrize(
    "settings",
    [{"method": "turbo", "rotate_k": "hadamard", "equalize_k": True}, {"method": "kivi", "compensate_k": True}],
    ids=["equalize_k", "compensate_k"],
)
def test_constants_of_the_weights_follow_them(settings: dict[str, Any]):
    model = patch(tiny(head_dim=32), **settings)

    def constants() -> list[torch.Tensor]:
        return [tensor for layer in model._qattn.constants for tensor in layer.values()]

    first = constants()
    model.generate(ONE, max_new_tokens=2)
    assert all(a is b for a, b in zip(first, constants(), strict=True)), "computed once for the same weights"
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.train()
    got = model.generate(ONE, max_new_tokens=2)
    found = constants()
    assert len(found) == len(first) > 0 and not any(map(torch.equal, found, first))
    assert model.training and torch.equal(step(model)[0], step(unpatch(copy.deepcopy(model)))[0])
    again = patch(unpatch(model.eval()), **settings)
    assert all(map(torch.equal, found, constants()))
    assert torch.equal(again.generate(ONE, max_new_tokens=2), got)


def test_prefixes_of_a_persistent_manager_are_not_those_of_earlier_weights():
    model, prompt = patch(tiny(), "int8"), ONE[0].tolist()
    sizes = {"max_new_tokens": 3, "persistent_manager": True, "progress_bar": False}

    def answer(model: PreTrainedModel) -> list[int]:
        (output,) = model.generate_batch([prompt], **sizes).values()
        return output.generated_tokens

    answer(model)
    manager = model._cached_continuous_batching_manager
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    refused(lambda: manager.add_request(prompt), QAttnError, "weights were trained", "init_continuous_batching()")
    got = answer(model)
    model.destroy_cached_continuous_batching_manager()
    fresh = patch(unpatch(model), "int8")
    assert got == answer(fresh)
    fresh.destroy_cached_continuous_batching_manager()
