"""The sink pool that `turbo` has by default: where it is used, where it is left out with a reason, and old records."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import recorded
import small_types
import torch
from refusals import refused
from small_configs import small_config
from transformers import AutoModelForCausalLM

from qattn_hf import RecipeError, load_recipe, patch, report
from qattn_hf.methods import get_method
from qattn_hf.recipes.recipe import find_recipe
from qattn_kernels.layout import SinkPool

pytestmark = pytest.mark.usefixtures("no_grad")
POOL = SinkPool(3, 8)
IDS = torch.randint(3, 90, (1, 150), generator=torch.Generator().manual_seed(3))


def pool_of(spelled: str) -> SinkPool:
    return find_recipe(spelled, None, {}).settings.last_layer_spec(2).sink_pool


@pytest.mark.parametrize("spelled", ["turbo", "turbo:bits=2", "turbo:bits=mixed", "turbo_sink", "turbo:memory=1GiB"])
def test_turbo_has_a_pool_unless_it_is_told_not_to(spelled: str):
    assert pool_of(spelled) == POOL
    off = ",sink_num=0" if ":" in spelled else ":sink_num=0"
    assert pool_of(spelled + off) == SinkPool()


def test_recipes_are_what_their_names_say():
    defaults = find_recipe("turbo", None, {}).settings
    assert load_recipe("turbo_sink").settings.model_dump() == defaults.model_dump()
    assert load_recipe("turbo_paper").settings == find_recipe("turbo:sink_num=0", None, {}).settings


@pytest.mark.parametrize("settings", [{"smooth_k": True}, {"buffer_size": 128}], ids=str)
def test_the_default_is_left_out_where_no_kernel_knows_it(settings: dict[str, Any]):
    """Settings with kernels keep their kernels.

    A pool that the user requests with such a setting is computed by the reference.
    """
    kind = get_method("turbo")
    plain, asked = kind(**settings), kind(**settings, sink_num=3)
    assert plain.last_layer_spec(2).sink_pool == SinkPool() and asked.last_layer_spec(2).sink_pool == POOL
    assert plain.why_no_pool(plain.last_layer_spec(2)) and asked.why_no_pool(asked.last_layer_spec(2)) is None


@pytest.mark.parametrize("settings", [{"sink_num": 0}, {"sink_skip_layers": 9}], ids=str)
def test_a_pool_that_nobody_wants_has_no_reason(settings: dict[str, Any]):
    every = get_method("turbo")().model_dump() | settings  # as a file that gives every setting
    for own in (get_method("turbo")(**settings), get_method("turbo")(**every)):
        spec = own.layer_spec(0, 8, 2)
        assert spec.sink_pool == SinkPool() and own.why_no_pool(spec) is None


def test_windows_are_packed_without_the_default_and_say_so():
    model = patch(small_types.tiny("gemma2"), "turbo", family=False, sliding="packed", crop_horizon=32)
    model(IDS)
    window, full = report(model).to_dict()["layers"][:2]
    assert "window" in window["no_sinks"] and not window["sinks"]
    assert full["no_sinks"] is None and full["sinks"] >= 3 * 2  # of each head, and what left
    assert "sinks: none (a sliding window drops its sinks)" in " ".join(str(report(model)).split())


def test_latent_attention_goes_without_the_default_and_says_so():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("deepseek_v3"), dtype=torch.float32).eval()
    for given in ({"method": "turbo", "family": False}, {"recipe": "turbo"}):  # the file has every setting
        patch(model, **given)
        model(IDS)
        assert "latent attention" in report(model).to_dict()["layers"][0]["no_sinks"]
    refused(lambda: patch(model, "turbo", family=False, sink_num=3), RecipeError, "a sink pool")


@pytest.mark.parametrize(("bits", "warns"), [(2, True), ("mixed", True), (4, False)])
def test_windows_of_fewer_than_4_bits_are_warned_of(bits: Any, warns: bool):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        patch(small_types.tiny("gemma2"), "turbo", family=False, bits=bits, sliding="packed", crop_horizon=32)
    assert [str(one.message) for one in found if "sliding='exact'" in str(one.message)] != [] or not warns
    assert warns or not any("fewer than" in str(one.message) for one in found)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("turbo", "turbo:sink_num=0"),
        ("turbo graph", "turbo:sink_num=0 graph"),
        ("turbo:bits=2", "turbo:bits=2,sink_num=0"),
        ("turbo:bits=mixed,sink_num=3,sink_window=8", "turbo:bits=mixed"),
        ("turbo:sink_num=3", "turbo:sink_window=0"),
        ("turbo_sink", "turbo"),
        ("turboquant:k_format=turbo4", "turboquant:k_format=turbo4"),
    ],
)
def test_what_was_recorded_before_is_spelled_as_it_was_measured(was: str, now: str):
    former = {"turbo": {"sink_num": 0, "sink_window": 0}}
    record = {"name": "speed-x", "defaults": former, "rows": [{"way": was, "ms": 1.0}]}
    assert recorded.spelled_now(record)["rows"] == [{"way": now, "ms": 1.0}]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("low3", "sinkq:bits=3,rotate_k=hadamard"),
        ("low3:clip=0.5 graph", "sinkq:bits=3,rotate_k=hadamard,clip=0.5 graph"),
        ("low3:rotate_v=hadamard,equalize_k=true,compensate_k=true", "low3"),  # what the recipe is today
        ("turbo_sink", "turbo"),
        ("turbo:sink_num=0", "turbo:sink_num=0"),  # as the methods' lists have it, though a recipe is the same
        ("StaticCache, compiled", "StaticCache, compiled"),
    ],
)
def test_a_recipe_of_other_settings_is_spelled_by_these(was: str, now: str):
    record = {"name": "speed-x", "recipes": {"low3": "sinkq:bits=3,rotate_k=hadamard"}, "rows": [{"way": was}]}
    assert recorded.spelled_now(record)["rows"] == [{"way": now}]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("was", ["turbo:sliding=model eager", "turbo:sliding=lossless eager"])
def test_an_old_name_in_a_record_gives_no_warning(was: str):
    recorded.named.cache_clear()
    assert recorded.spelled_now({"name": "speed-x", "rows": [{"way": was}]})["rows"] == [{"way": "turbo eager"}]


def test_settings_that_stand_apart_in_a_record_are_spelled_too():
    rows = [{"method": "turbo", "bits": "mixed", "kl": 0.1}, {"method": "turbo", "sink_num": 3, "sink_window": 8}]
    record = {"name": "quality-x", "defaults": {"turbo": {"sink_num": 0, "sink_window": 0}}, "rows": rows}
    assert recorded.spelled_now(record)["rows"] == [
        {"method": "turbo", "kl": 0.1, "bits": "mixed", "sink_num": 0},
        {"method": "turbo"},
    ]
