"""`QAttnConfig`: what `from_pretrained` loads by name is what `patch` makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qattn_hf import QAttnConfig, RecipeError, patch, report, unpatch
from qattn_hf.assets import demo_model_dir

SETTINGS = {"bits": 4, "sink_num": 2, "impl": "reference"}
INPUTS = torch.arange(5, 155)[None]


def load(source: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)


def answer(model: PreTrainedModel) -> list[int]:
    return model.generate(INPUTS, do_sample=False, max_new_tokens=12)[0, INPUTS.shape[1] :].tolist()


@pytest.fixture(scope="module")
def want() -> list[int]:
    return answer(patch(load(demo_model_dir()), "turbo", **SETTINGS))


@pytest.mark.slow
def test_a_model_loaded_by_name_is_the_patched_one(want: list[int], tmp_path: Path):
    model = load(demo_model_dir(), quantization_config=QAttnConfig("turbo", **SETTINGS))
    assert answer(model) == want and report(model).to_dict()["packed_tokens"] > 0
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        assert not hasattr(model, name) or getattr(model, name) is None, name
    assert not hasattr(model.config, "quantization_config") and not hasattr(model.config, "_is_quantized")
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (tmp_path / "qattn.yaml").exists()
    assert answer(unpatch(model)) == answer(load(demo_model_dir()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose `config.json` names the method."""
    model = load(demo_model_dir())
    model.config.quantization_config = QAttnConfig("turbo", **SETTINGS)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_model_dir()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_folder_that_names_the_method_is_patched_by_every_loader(want: list[int], folder: Path):
    assert answer(load(folder)) == want
    assert hasattr(AutoModel.from_pretrained(folder), "_qattn")
    assert hasattr(pipeline("text-generation", model=str(folder)).model, "_qattn")


def test_a_pipeline_takes_it_among_the_models_arguments():
    config = QAttnConfig("turbo", **SETTINGS)
    found = pipeline("text-generation", model=str(demo_model_dir()), model_kwargs={"quantization_config": config})
    assert hasattr(found.model, "_qattn")


def test_without_this_package_the_folder_loads_unpatched(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "qattn")
    model = load(folder)
    assert not hasattr(model, "_qattn") and answer(model) == answer(load(demo_model_dir()))


def test_without_a_method_the_model_chooses_within_a_budget():
    with pytest.raises(RecipeError, match=r"bits.*0\.1|0\.1.*bits"):
        load(demo_model_dir(), quantization_config=QAttnConfig(bits=0.1))


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [("turbo", {"bitz": 4}, "bitz"), (None, {"bits": 1}, "bits=2.5"), (None, {"kl": "low"}, "kl=0.01")],
    ids=str,
)
def test_settings_are_checked_before_anything_is_loaded(method: str | None, settings: dict[str, Any], said: str):
    with pytest.raises(RecipeError, match=said):
        QAttnConfig(method, **settings)


def test_a_budget_takes_settings_that_all_methods_have():
    assert QAttnConfig(bits=3.5, decode="eager").settings == {"bits": 3.5, "decode": "eager"}


CUSTOM = Path(__file__).resolve().parent.parent / "examples" / "packed_generate"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies remote code to this folder and imports it from there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))


def test_a_folder_packs_one_call_of_generate(want: list[int], modules: None):
    model = load(demo_model_dir())
    call = {"custom_generate": str(CUSTOM), "trust_remote_code": True, "do_sample": False, "max_new_tokens": 12}
    method = ",".join(f"{key}={value}" for key, value in SETTINGS.items())
    found = model.generate(INPUTS, method=f"turbo:{method}", **call)
    assert found[0, INPUTS.shape[1] :].tolist() == want
    assert not hasattr(model, "_qattn") and answer(model) == answer(load(demo_model_dir()))
    with pytest.raises(ValueError, match="leave custom_generate out"):
        patch(model, "int8").generate(INPUTS, **call)


def test_a_checkpoint_with_quantized_weights_keeps_its_config(folder: Path):
    """Transformers accepts one config. It refuses ours by name, which `docs/troubleshooting.md` explains."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="quantized with FineGrainedFP8Config but you are passing a QAttnConfig"):
        load(folder, quantization_config=QAttnConfig("turbo"))
