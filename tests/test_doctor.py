"""`qattn doctor` predicts from a config what `patch` does and how much a cache takes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import random_ids, tiny_llama
from refusals import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from qattn_hf import QAttnError, RecipeError, UnsupportedError, patch
from qattn_hf.compare import size_of
from qattn_hf.planning import doctor, machine
from qattn_hf.planning.cards import CARDS
from qattn_hf.planning.check import check

REFUSED = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
    "bert": {**SIZES, "is_decoder": False},
}


@pytest.fixture
def qattn(qattn):
    return partial(qattn, "doctor")


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


def attend_of(data: dict) -> list[dict]:
    """The tiles of the prompts' attention in the data of `qattn doctor --json`."""
    return [one["tiles"] for row in data["kernels"] for one in row["kernels"] if one["kernel"] == "attend"]


def test_a_card_that_is_not_here_has_its_tiles_and_memory(qattn, tmp_path):
    tiny_llama(head_dim=256).config.save_pretrained(tmp_path)
    found = {}
    for card in ("rtx-4090", "h200"):
        code, out, _ = qattn(str(tmp_path), "--method", "kivi", "--gpu", card, "--json")
        data = found[card] = json.loads(out)
        assert code == 0 and data["problems"] == [] and data["kernels"][0]["layers"] == [0, 1]
        assert data["machine"]["gpu"]["name"] == CARDS[card].name and data["longest"] > 0
        assert {"decode_kernel", "attend"} <= {one["kernel"] for one in data["kernels"][0]["kernels"]}
    (small,), (large,) = map(attend_of, found.values())
    assert small["bn"] < large["bn"], "99 KiB of shared memory hold fewer tokens"
    code, out, _ = qattn(str(tmp_path), "--method", "kivi", "--gpu", "RTX-4090")
    assert code == 0 and "99 KiB of shared memory a program, 23.5 GiB" in out
    assert f"{small['queries']} queries x {small['bn']} tokens, " in out
    code, out, err = qattn(str(tmp_path), "--gpu", "rtx")
    assert code == 2 and not out and "rtx is unknown. Fix: give one of t4, rtx-3090" in err


def test_layers_without_kernels_on_a_card_have_the_reason(qattn, tmp_path):
    tiny_llama(head_dim=64).config.save_pretrained(tmp_path)
    code, out, _ = qattn(str(tmp_path), "--method", "sage2", "--gpu", "rtx-3090")
    assert code == 0 and "computed by reference (FP8" in out and "kernels of layers" not in out
    assert "computed by triton" in qattn(str(tmp_path), "--method", "sage2", "--gpu", "l4")[1]


def test_a_card_before_ampere_has_no_kernels(qattn):
    code, out, _ = qattn("--gpu", "t4")
    assert code == 0 and "computed by reference (kernels need compute capability 8.0" in out


def test_without_a_gpu_it_says_so(qattn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = qattn("--method", "int8")
    assert code == 0 and "no GPU here" in out and "kernels of layers 0-7: " in out
    assert f"torch {torch.__version__} (tested: 2.11 to 2.15)" in out


HERE = {"here": True, "compiler": "gcc", "cache": "~/.triton/cache", "cache_writable": True}


@pytest.mark.parametrize(
    ("lacking", "words"),
    [({"compiler": None}, "install gcc"), ({"cache_writable": False}, "set TRITON_CACHE_DIR")],
    ids=["compiler", "cache"],
)
def test_what_keeps_kernels_from_running_ends_with_1(lacking, words, qattn, monkeypatch):
    monkeypatch.setattr(machine, "no_triton", lambda device_type: None)
    assert machine.problems(HERE) == []
    found = machine.machine() | HERE | lacking
    monkeypatch.setattr(doctor, "machine", lambda card: found)
    code, out, err = qattn("--method", "int8")
    assert code == 1 and "works: patch takes it" in out and words in err
    assert json.loads(qattn("--method", "int8", "--json")[1])["problems"] == machine.problems(found)
    assert qattn("--method", "int8", "--gpu", "l4")[0] == 0, "the answer is for another machine"
    assert qattn("--method", "int8", "--device", "cpu")[0] == 0, "nothing is compiled"


def test_a_torch_without_cuda_next_to_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "install a torch for CUDA" in machine.problems({"here": False})[0]
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.problems({"here": False}) == []


def test_a_folder_below_a_file_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert machine.writable(tmp_path / "new" / "cache") and not machine.writable(tmp_path / "file" / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert machine.cache_folder() == tmp_path


def test_versions_that_were_not_tested_are_named():
    known = {name: first for name, (first, _) in machine.TESTED.items()}
    assert machine.untested(known) == machine.untested({**known, "triton": None}) == []
    assert machine.untested({**known, "torch": "2.15.9+cu130"}) == []
    assert machine.untested({**known, "torch": "3.0.0"}) == ["torch 3.0.0 is untested: 2.11 to 2.15 were tested"]
    required = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("torch", "triton", "transformers"):
        assert re.search(rf'"{name}>={re.escape(machine.TESTED[name][0])}\b', required), name
