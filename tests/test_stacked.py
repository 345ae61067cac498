"""Layers stacked in one packed layer give the results of separate packed layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from small_types import tiny
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import constants
from qattn_hf.attention.observe import Call, observed, packed_layers
from qattn_hf.fidelity.compare import compare
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.sensitivity import Trial, losses
from qattn_hf.reading.stacked import Member, StackedLayers
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes.recipe import find_recipe

AT = [0, 90, 122, 123]  # a prompt, a call of several tokens, a decode step
SETTINGS = ["turbo", "turbo:bits=mixed", "sinkq", "low2", "low3", "turbo_rotated", "int8", "kivi", "turboquant"]


def members_of(model: PreTrainedModel, settings: list[str]) -> list[Member]:
    found = []
    for setting in settings:
        specs = find_recipe(setting, None, {"impl": "reference"}).for_model(model.config).layer_specs(model.config)
        own = constants(model, specs)
        found += [Member(i, specs[i], own[i]) for i in packed_layers(model)]
    return found


def with_learned_sinks() -> PreTrainedModel:
    return tiny("gpt_oss", layer_types=["full_attention"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"), [(tiny_llama, SETTINGS), (with_learned_sinks, ["turbo:bits=mixed", "sinkq", "low3"])]
)
def test_a_stack_says_what_its_layers_say_alone(model: Any, settings: list[str]):
    module: PreTrainedModel = model()
    members = members_of(module, settings)
    stacked = StackedLayers(members, "cpu", AT[-1])
    alone = [QAttnLayer(member.spec, device_type="cpu") for member in members]
    for layer, member in zip(alone, members, strict=True):
        layer.constants = dict(member.constants)
    calls: dict[int, Call] = {}
    with observed(module, lambda call: calls.update({call.layer: call})):
        for _ in feed(module, random_ids(2, AT[-1]), AT):
            for member, layer, out in zip(members, alone, stacked.outputs(calls), strict=True):
                # products of other shapes add in another order: fp32's rounding, far below a code's step
                torch.testing.assert_close(out, calls[member.layer].packed_out(layer), rtol=1e-4, atol=1e-5)
    assert stacked.stacks is not None and len(stacked.stacks) < len(members)
    assert all(stack.packed.planned for stack in stacked.stacks), "no call makes a layer grow"


def test_layers_with_and_without_learned_sinks_are_stacked_apart():
    """A stack has the learned logits of all its heads, or of none."""
    module = tiny_llama()
    members = members_of(module, ["low3"])
    calls: dict[int, Call] = {}
    with observed(module, lambda call: calls.update({call.layer: call})):
        next(feed(module, random_ids(1, 90), [0, 90]))
    first = calls[members[0].layer]
    logits = torch.full((first.query.shape[1],), 3.0)
    calls[first.layer] = first._replace(scores=first.scores._replace(sinks=logits))
    stacked = StackedLayers(members, "cpu", 90)
    for member, out in zip(members, stacked.outputs(calls), strict=True):
        layer = QAttnLayer(member.spec, device_type="cpu")
        layer.constants = dict(member.constants)
        # products of other shapes add in another order: fp32's rounding
        torch.testing.assert_close(out, calls[member.layer].packed_out(layer), rtol=1e-4, atol=1e-5)
    assert stacked.stacks is not None and len(stacked.stacks) == 2


@pytest.mark.parametrize("setting", ["turbo:bits=2", "turbo"])
def test_errors_of_all_layers_at_once_cost_about_what_they_cost_a_patched_model(setting: str):
    module = tiny_llama(initializer_range=0.3)
    reading = read_as(random_ids(2, 200), batch=2)
    recipe = find_recipe(setting, None, {})
    trial = [Trial(i, spec) for i, spec in enumerate(recipe.layer_specs(module.config))]
    (found,) = losses(module, [trial], reading)
    # left out: the effect of the first layer's error on the second layer, and each row's last token
    assert found == pytest.approx(compare(module, {setting: recipe}, reading)[0]["kl"], rel=0.25)
