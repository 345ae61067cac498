"""`qattn check` predicts from a config what `patch` does and how much a cache takes."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import random_ids, tiny_llama
from refusals import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from qattn_hf import QAttnError, RecipeError, UnsupportedError, patch
from qattn_hf.cli import main
from qattn_hf.compare import size_of
from qattn_hf.planning.check import check

REFUSED = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
    "bert": {**SIZES, "is_decoder": False},
}


@pytest.fixture
def qattn(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def config_of(family: str):
    return AutoConfig.for_model(family, **{"vocab_size": 101, **REFUSED[family]})


@pytest.mark.parametrize("method", ["turbo", "turbo_sink_k4v2", "kivi:bits=2", "int8", "turboquant", "none"])
def test_sizes_are_those_of_a_cache(method):
    model = patch(tiny_llama(), method)
    with torch.inference_mode():
        cache = model(random_ids(1, 300)).past_key_values
    model.config.dtype = model.dtype  # as `save_pretrained` writes it
    wanted, found = size_of(cache, 4096, model.dtype), check(model.config, method, device_type="cpu", at_tokens=4096)
    assert found.refused is None and found.kv_bytes == wanted.kv_bytes
    assert found.effective_bits == pytest.approx(wanted.effective_bits, rel=1e-6)
    assert found.effective_bits_total == wanted.effective_bits_total
    assert found.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert [row["kernels"] for row in found.layers] == ["reference"] * 2
    assert found.bytes_per_token_full_precision == 2 * 2 * 2 * 16 * 4


def test_the_longest_context_fits_and_a_longer_one_does_not():
    config = tiny_llama().config
    memory = check(config).weight_bytes + 2**20
    tokens = check(config).longest(memory)
    block = 64
    assert check(config, at_tokens=tokens - block).kv_bytes <= 2**20 < check(config, at_tokens=tokens + block).kv_bytes
    assert check(config).longest(0) == 0 < check(config).longest(memory, full_precision=True) < tokens


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_is_refused_as_patch_refuses_it(family, qattn, tmp_path):
    config = config_of(family)
    with pytest.raises(UnsupportedError) as refusal:
        patch(AutoModelForCausalLM.from_config(config).eval(), "turbo")
    assert check(config).refused == str(refusal.value)
    config.save_pretrained(tmp_path)
    code, out, err = qattn(str(tmp_path))
    assert code == 1 and str(refusal.value) in out and err.count("\n") == 1 and "layers" in out


def test_an_encoder_decoder_is_refused():
    config = AutoConfig.for_model("t5", vocab_size=101, d_model=32, d_ff=32, d_kv=16, num_layers=2, num_heads=2)
    assert "T5" in str(check(config).refused) or "t5" in str(check(config).refused)
    config.architectures = [type(AutoModelForSeq2SeqLM.from_config(config)).__name__]
    assert "encoder-decoder" in str(check(config).refused)


def test_settings_that_do_not_fit_the_model_are_refused(qattn, tmp_path):
    config = tiny_llama().config
    with pytest.raises(RecipeError, match="n_h = 3"):
        check(config, "turbo:bits=mixed,n_h=3")
    config.save_pretrained(tmp_path)
    code, _, err = qattn(str(tmp_path), "--method", "turbo:bits=mixed,n_h=3")
    assert code == 2 and "n_h = 3" in err


def test_the_command_needs_a_config_alone(qattn, tmp_path):
    tiny_llama(head_dim=64).config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    layers = 'layers={"1": {"method": "int8"}}'
    code, out, err = qattn(str(tmp_path), "--set", layers, "--gpu-memory", "1GiB")
    assert (code, err) == (0, "") and "works" in out and "longest context of one row in 1 GiB with this method" in out
    assert "layers 0-0: turbo" in out and "layers 1-1: int8" in out and "computed by triton" in out
    data = json.loads(qattn(str(tmp_path), "--json", "--gpu-memory", "1GiB")[1])
    assert data["refused"] is None and data["longest"] > data["longest_full_precision"] and len(data["layers"]) == 2
    code, out, _ = qattn(str(tmp_path), "--method", "sage2:cache=model")
    assert code == 0 and "nothing is packed" in out
    assert qattn(str(tmp_path / "missing"))[0] == 1


QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "bitsandbytes": {"load_in_4bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_not_counted_as_unquantized_ones(name, qattn, tmp_path):
    config = tiny_llama().config
    config.quantization_config = QUANTIZED[name]
    result = check(config)
    assert (result.refused, result.weight_bytes, result.quantization) == (None, None, name)
    with pytest.raises(QAttnError, match=f"quantized \\({name}\\).*weight_bytes=N"):
        result.longest(2**30)
    assert check(config, weight_bytes=2**20).longest(2**30) == check(tiny_llama().config, weight_bytes=2**20).longest(
        2**30
    )
    config.save_pretrained(tmp_path)
    code, out, _ = qattn(str(tmp_path))
    assert code == 0 and f"weights: quantized ({name}), not counted" in out
    code, _, err = qattn(str(tmp_path), "--gpu-memory", "1GiB")
    assert code == 1 and "--weights 16GiB" in err
    code, out, _ = qattn(str(tmp_path), "--gpu-memory", "1GiB", "--weights", "0.5GiB")
    assert code == 0 and "weights: 512.0 MiB\n" in out and "longest context of one row in 1 GiB with this method" in out
