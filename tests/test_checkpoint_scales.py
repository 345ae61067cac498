"""`scales: checkpoint` of `fp8` and `int8`: keys and values by the scales that a checkpoint brings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import feed, make_layer, random_ids, random_qkv, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from qattn_hf import QAttnCache, RecipeError, UnsupportedError, patch, report
from qattn_hf.methods import get_method
from qattn_kernels.layer.support import unsupported

VLLM = "self_attn.{side}_scale"
NAMES = (
    VLLM,
    "self_attn.{side}_proj.{side}_scale",
    "self_attn.{side}_proj.output_scale",
    "self_attn.attn.{side}_scale",
)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
METHODS = pytest.mark.parametrize("method", ["fp8", "int8"])
Checkpoint = Callable[..., PreTrainedModel]


def scale_of(layer: int, side: str) -> torch.Tensor:
    return torch.tensor(0.01 * (layer + 1) if side == "k" else 0.02 * (layer + 1))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Loads a tiny Llama from a folder whose weights have scales of this name, and whose config has these keys."""

    def make(name: str = VLLM, sides: str = "kv", change: Any = None, **config: Any) -> PreTrainedModel:
        tiny_llama().save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        for layer in range(2):
            for side in sides:
                scale = scale_of(layer, side) if change is None else change.clone()
                weights[f"model.layers.{layer}.{name.format(side=side)}"] = scale
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
        return AutoModelForCausalLM.from_pretrained(tmp_path).eval()

    return make


def scheme(**changes: Any) -> dict[str, Any]:
    """A config whose weights are unquantized, as compressed-tensors writes it."""
    quantized = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    return {"quantization_config": {**quantized, "kv_cache_scheme": {**SCHEME, **changes}}}


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_found_by_the_names_of_three_tools(checkpoint: Checkpoint, name: str):
    model = patch(checkpoint(name), "fp8", scales="checkpoint")
    for layer, found in enumerate(model._qattn.constants):
        assert found.keys() == {"k.static", "v.static"}
        assert all(torch.equal(found[f"{side}.static"], scale_of(layer, side).expand(2)) for side in "kv")


def test_one_scale_may_be_for_both_sides(checkpoint: Checkpoint):
    model = patch(checkpoint("self_attn.kv_scale", sides="k"), "fp8", scales="checkpoint")
    assert all(torch.equal(found["k.static"], found["v.static"]) for found in model._qattn.constants)


@METHODS
def test_numbers_are_stored_by_the_scale_and_saturate(method: str):
    layer, (q, k, v) = make_layer((method, {"scales": "checkpoint"})), random_qkv(2, 130)
    k[0, 0, 7] = 1e4
    feed(layer, q, k, v, [100, 130])
    for side, x in (("k", k), ("v", v)):
        scale = layer.state[f"{side}.static"]
        fmt = getattr(layer.spec, side)
        state = {name[2:]: tensor for name, tensor in layer.state.items() if name.startswith(f"{side}.")}
        found = fmt.read(state, 2).dequantize().flatten(2, 3)
        number = (x[:, :, :128] / scale[:, None, None]).clamp(*((-448, 448) if method == "fp8" else (-127, 127)))
        code = number.to(torch.float8_e4m3fn).float() if method == "fp8" else number.round()
        assert torch.equal(found, code * scale[:, None, None])
        assert torch.equal(state["scale"][:, :, :2].flatten(2), scale[:, None].expand(2, -1, 128))


@METHODS
def test_bytes_do_not_depend_on_the_calls(method: str):
    q, k, v = random_qkv(2, 130)
    whole, cut = (make_layer((method, {"scales": "checkpoint"})) for _ in range(2))
    feed(whole, q, k, v, [130])
    feed(cut, q, k, v, [61, 100, *range(101, 131)])
    for (name, (one, _)), (other, _) in zip(whole.state_tensors().items(), cut.state_tensors().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("method", "kind"), [("fp8", "float"), ("int8", "int")])
def test_a_model_generates_saves_and_loads_with_them(checkpoint: Checkpoint, method: str, kind: str, tmp_path: Path):
    model = patch(checkpoint(**scheme(type=kind)), method, scales="checkpoint")
    ids = random_ids(2, 100)
    out = model.generate(ids, do_sample=False, max_new_tokens=4, return_dict_in_generate=True)
    assert report(model).to_dict()["packed_tokens"] > 0
    cache = out.past_key_values
    assert torch.equal(cache.layers[1].state["k.static"], scale_of(1, "k").expand(2))
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAttnCache.load(tmp_path / "cache.safetensors", model=model)
    step = out.sequences[:, -1:]
    assert torch.equal(*(model(step, past_key_values=one).logits for one in (cache, loaded)))


@pytest.mark.parametrize(
    ("made", "method", "said"),
    [
        ({"sides": ""}, "fp8", "has no k_scale for layer 0"),
        ({"sides": "k"}, "fp8", "has no v_scale for layer 0"),
        ({"change": torch.ones(2)}, "fp8", "must be one positive number and has 2"),
        ({"change": torch.zeros(1)}, "fp8", "must be one positive number"),
        ({}, "int8", "float8 cache, and int8 stores int8"),
        (scheme(type="int"), "fp8", "int8 cache, and fp8 stores float8"),
        (scheme(num_bits=4), "fp8", "float4 cache"),
    ],
)
def test_other_checkpoints_are_refused_with_what_to_take(
    checkpoint: Checkpoint, made: dict[str, Any], method: str, said: str
):
    model = checkpoint(**made)
    with pytest.raises(UnsupportedError, match=rf"scales='checkpoint': .*{said}.*Fix: use scales='token'"):
        patch(model, method, scales="checkpoint")
    assert not hasattr(model, "_qattn")


def test_a_model_without_files_is_refused():
    with pytest.raises(UnsupportedError, match=r"the files of .* are not on this machine"):
        patch(tiny_llama(), "fp8", scales="checkpoint")


def test_a_cache_without_a_model_is_refused(checkpoint: Checkpoint):
    model = patch(checkpoint(), "fp8", scales="checkpoint")
    with pytest.raises(UnsupportedError, match="made without a model"):
        model(random_ids(1, 8), past_key_values=QAttnCache(model._qattn.specs, model._qattn.recipe))


@pytest.mark.parametrize("settings", [{"rotate_k": "hadamard"}, {"rotate_v": "hadamard"}, {"smooth_k": True}], ids=str)
def test_they_do_not_fit_changed_numbers(settings: dict[str, Any]):
    with pytest.raises(RecipeError, match="use scales='token'"):
        patch(tiny_llama(), "int8", scales="checkpoint", **settings)


@METHODS
def test_kernels_leave_them_to_the_reference(method: str):
    spec = get_method(method)(scales="checkpoint").last_layer_spec(2)
    assert "only the reference" in (unsupported(spec, 2, 64, 64) or "")
