"""Which layers the kernels take, and that what they do not take is said and computed by the reference."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, case_id, random_ids, tiny_llama

from qattn_hf import RecipeError, UnsupportedError, patch, report
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_hf.recipes.recipe import find_recipe
from qattn_kernels import chip
from qattn_kernels.layer.support import no_triton, unsupported

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
REASONS = [
    ("turbo", {"block_kv": 32}, (2, 64), "32 tokens"),
    ("paper_turbo", {"p_scale": "tile"}, (2, 64), "p_scale is 'tile'"),
    ("paper_turbo", {"buffer_scale": "universal"}, (2, 64), "buffer_scale is 'universal'"),
    ("paper_turbo", {"bits": "mixed", "priority": "entropy"}, (2, 64), "priority is 'entropy'"),
    ("turbo", {"bits": "mixed", "k_low_heads": [[60]]}, (64, 64), None),
    ("turbo", {"bits": "mixed", "k_low_heads": [[0, 61]]}, (64, 64), "head 61 is listed"),
    ("turbo", {"sparse_v_tau": 1e-3}, (2, 64), None),
    ("none", {"compute": "int8"}, (2, 64), "that are not integers"),
    ("kivi", {"compute": "int8"}, (2, 64), "that are not integers"),
    ("kivi", {"v_bits": 3}, (2, 64), None),
    ("kivi", {"group_size": 32}, (2, 64), None),
    ("fp8", {}, (2, 128), None),
    ("paper_int_flash", {"v_granularity": "tensor"}, (2, 64), "v_granularity is 'tensor'"),
    ("int_flash", {"mode": "half"}, (2, 256), None),
    ("int_flash", {"bits": 4, "rotate": "hadamard"}, (2, 80), None),
    ("turboquant", {}, (2, 96), None),
    ("turboquant", {}, (2, 72), None),
    ("turboquant", {"norm_block": 16}, (2, 128), "16 channels share a norm"),
    ("turboquant", {"compute": "int8"}, (2, 128), "that are not integers"),
    ("sage2", {"cache": "model", "bits": 4}, (2, 128), None),
    ("paper_sage2", {"cache": "model", "granularity": "tensor"}, (2, 64), "granularity is 'tensor'"),
    ("paper_sage2", {"cache": "model", "pv": "e5m2"}, (2, 64), "pv is 'e5m2'"),
    ("turbo", {}, (2, 100), "head dims are 100 and 100; the kernels know multiples of 8 from 64 to 512"),
    ("turbo", {}, (2, 192), None),
    ("turbo", {}, (1, 256), None),
    ("turbo", {}, (1, 512), None),
    ("kivi", {"group_size": 128}, (1, 512), None),
    ("turbo", {}, (1, 520), "head dims are 520"),
    ("int8", {"compute": "model"}, (2, 80), None),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "settings", "sizes", "reason"), REASONS, ids=lambda x: str(x)[:40])
@pytest.mark.usefixtures("as_h200")
def test_what_the_kernels_take(method: str, settings: dict, sizes: tuple[int, int], reason: str | None):
    heads, dim = sizes
    found = unsupported(get_method(method)(**settings).layer_spec(0, 1, heads), heads, dim, dim)
    assert found is None if reason is None else reason in found


def test_triton_where_it_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    config = tiny_llama(**SIZES).config
    with pytest.raises(RecipeError, match="need a CUDA GPU, and the model is on cpu"):
        find_recipe("turbo", None, {"impl": "triton"}).layer_specs(config, "cpu")
    assert no_triton("cuda") is None
    specs = find_recipe("turbo", None, {}).layer_specs(config, "cpu")
    assert {spec.impl for spec in specs} == {"reference"}
    assert {spec.impl for spec in find_recipe("turbo", None, {}).layer_specs(config, "cuda")} == {"triton"}
    with pytest.raises(RecipeError, match="block"):
        find_recipe("turbo", None, {"impl": "triton", "block_kv": 32}).layer_specs(config, "cuda")


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_products_need_a_gpu_that_has_them(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chip, "properties", lambda device: chip.H200._replace(capability=capability))
    for settings in ({}, {"cache": "model"}):
        found = unsupported(get_method("sage2")(**settings).layer_spec(0, 1, 2), 2, 64, 64)
        assert found is None if fits else "sage2:pv=model, int8 or turboquant" in found
    for method, settings in (("sage2", {"pv": "model"}), ("fp8", {}), ("int8", {}), ("turboquant", {})):
        assert unsupported(get_method(method)(**settings).layer_spec(0, 1, 2), 2, 64, 64) is None


def test_gpus_before_ampere_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chip, "properties", lambda device: chip.H200._replace(capability=(7, 5)))
    for method in ("turbo", "none"):
        found = unsupported(get_method(method)().layer_spec(0, 1, 2), 2, 64, 64)
        assert found == "kernels need compute capability 8.0, and this GPU has 7.5"


def test_a_layer_of_other_sizes_than_its_config_fails_closed():
    layer = QAttnLayer(find_recipe("turbo", None, {}).layer_specs(tiny_llama(**SIZES).config, "cuda")[0])
    k = torch.zeros(1, 1, 4, 40)
    with pytest.raises(UnsupportedError, match=r"head dims are 40.*impl='reference'"):
        layer.update(k, k)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [("int8", {}), ("int_flash", {"rotate": "hadamard"}), ("turboquant", {})], ids=case_id)
def test_a_model_generates_through_the_kernels(case: Case):
    """Interpreted without a GPU: prefill, decode and the end of a block, with logits near the reference's."""
    model = tiny_llama(**SIZES).to(DEVICE)
    ids = random_ids(1, 62).to(DEVICE)
    made: dict[str, torch.Tensor] = {}
    for impl in ("reference", "triton"):
        patch(model, case[0], impl=impl, **case[1])
        out = model.generate(ids, do_sample=False, max_new_tokens=4, output_logits=True, return_dict_in_generate=True)
        made[impl] = torch.stack(out.logits)
        assert report(model).to_dict()["impl"] == impl
    assert (made["triton"] - made["reference"]).abs().max() < 0.05  # logits spread over about 1
