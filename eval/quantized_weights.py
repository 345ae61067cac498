"""Packed caches with quantized weights: `python eval/quantized_weights.py` prints a JSON row for each kind of weights.

Transformers' quantizer loads each kind from a local folder, as users do: float weights with a `quantization_config`, or
a checkpoint with random codes in the format's layout. If a kind's packages are missing or cannot load here, its row has
the `reason` in place of results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from qattn_hf import QAttnCache, UnsupportedError, patch, report, unpatch

GROUP = 32  # inputs that share a scale
IDS = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(1))
GREEDY = {"input_ids": IDS, "max_new_tokens": 70, "min_new_tokens": 70, "do_sample": False}  # past a block of 64
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 2, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """One kind of quantized weights.

    Attributes:
        packages: distributions that transformers needs to load it.
        config: the `quantization_config`, from names of modules to leave out.
        codes: tensors of a layer in place of `weight`, from a generator, outputs and inputs. None: transformers
            quantizes float weights as it loads them.
        plain: whether a CPU gets float weights of it.
    """

    packages: tuple[str, ...]
    config: Callable[[list[str]], Any]
    codes: Callable[[torch.Generator, int, int], Tensors] | None = None
    plain: bool = False


def words(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Random words of eight 4-bit codes."""
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=g).int()


def scales(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=g).half() / 50


def gptq_codes(g: torch.Generator, outputs: int, inputs: int) -> Tensors:
    return {
        "qweight": words(g, inputs // 8, outputs),
        "qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": scales(g, inputs // GROUP, outputs),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def awq_codes(g: torch.Generator, outputs: int, inputs: int) -> Tensors:
    return {
        "qweight": words(g, inputs, outputs // 8),
        "qzeros": words(g, inputs // GROUP, outputs // 8),
        "scales": scales(g, inputs // GROUP, outputs),
    }


def packed_codes(g: torch.Generator, outputs: int, inputs: int) -> Tensors:
    return {
        "weight_packed": words(g, outputs, inputs // 8),
        "weight_scale": scales(g, outputs, inputs // GROUP),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def fp8_codes(g: torch.Generator, outputs: int, inputs: int) -> Tensors:
    codes = (50 * torch.randn(outputs, inputs, generator=g)).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales(g, outputs, 1) / 20}


def fp8_block_codes(g: torch.Generator, outputs: int, inputs: int) -> Tensors:
    codes = fp8_codes(g, outputs, inputs)["weight"]
    return {"weight": codes, "weight_scale_inv": scales(g, -(-outputs // 128), -(-inputs // 128)).float() / 20}


def bitsandbytes(**how: Any) -> Callable[[list[str]], Any]:
    return lambda skip: transformers.BitsAndBytesConfig(llm_int8_skip_modules=["lm_head", *skip], **how)


def torchao(skip: list[str]) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(
        Int8WeightOnlyConfig(), modules_to_not_convert=["lm_head", *(f".*{part}" for part in skip)]
    )


def compressed_tensors(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Callable[[list[str]], Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return lambda skip: {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", *(f"re:.*{part}" for part in skip)],
    }  # fmt: skip


def gptq(skip: list[str]) -> dict[str, Any]:
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]  # of latent attention, without `kv_b_proj`
    inside = [[f"self_attn.{name}" for name in names] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]]
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    settings |= {"checkpoint_format": "gptq", "backend": "gptq_torch"}
    return settings | ({"modules_in_block_to_quantize": inside} if skip else {})


def awq(skip: list[str]) -> dict[str, Any]:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return settings | {"backend": "torch_awq", "modules_to_not_convert": skip or None}


def fp8(skip: list[str]) -> dict[str, Any]:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return settings | {"modules_to_not_convert": skip or None}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FLOAT8 = {"num_bits": 8, "type": "float"}
BY_TOKEN = {**FLOAT8, "symmetric": True, "strategy": "token", "dynamic": True}
KINDS: dict[str, Kind] = {
    "torchao INT8": Kind(("torchao",), torchao),
    "bitsandbytes LLM.int8()": Kind(("bitsandbytes",), bitsandbytes(load_in_8bit=True)),
    "bitsandbytes NF4": Kind(("bitsandbytes",), bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "GPTQ, 4 bits": Kind(("gptqmodel", "optimum"), gptq, gptq_codes),
    "AWQ, 4 bits": Kind(("gptqmodel",), awq, awq_codes),
    "compressed-tensors, INT4 packed": Kind(
        ("compressed-tensors",), compressed_tensors("pack-quantized", INT4, None), packed_codes
    ),
    "compressed-tensors, FP8": Kind(
        ("compressed-tensors",),
        compressed_tensors("float-quantized", {**FLOAT8, "strategy": "channel"}, BY_TOKEN),
        fp8_codes,
    ),
    "FP8 by blocks (DeepSeek)": Kind((), fp8, fp8_block_codes, plain=True),
}


def save(kind: Kind, folder: Path, model_type: str = "llama", skip: tuple[str, ...] = (), seed: int = 1) -> None:
    """Write a small model with random weights. If the kind has its own layout, write a checkpoint of this kind."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**(LATENT if model_type == "deepseek_v3" else SIZES))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    if kind.codes is None:
        return
    tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    left_out = ("lm_head", "embed_tokens", "norm", *skip)
    for name in [name for name in tensors if not any(part in name for part in left_out)]:
        weight = tensors.pop(name)
        codes = kind.codes(g, *weight.shape)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in codes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = kind.config(list(skip))
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def load(kind: Kind, folder: Path, skip: tuple[str, ...] = ()) -> PreTrainedModel:
    """The model in `folder`, its weights quantized by now or as it loads."""
    how = {} if kind.codes else {"quantization_config": kind.config(list(skip))}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **how).eval()


def tensors_of(model: PreTrainedModel) -> list[int]:
    """Which objects the weights and buffers of a model are."""
    return [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


def above(kind: Kind, folder: Path) -> dict[str, bool]:
    """Results of a Llama with these weights in `folder`; all True is what should be."""
    save(kind, folder)
    stock, model = load(kind, folder), load(kind, folder)
    held, want = tensors_of(model), stock.generate(**GREEDY)
    patch(model, "none", impl="reference")  # before its first call: weights may be unpacked in that
    found = {"patched_alone": tensors_of(model) == held}
    found["same_tokens"] = torch.equal(model.generate(**GREEDY), want)
    held = tensors_of(model)
    cache = patch(model, "int8", impl="reference")(IDS).past_key_values
    cache.save(folder / "cache.safetensors")
    QAttnCache.load(folder / "cache.safetensors", patch(stock, "int8", impl="reference"))
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES), dtype=torch.float32).eval()
    for method in ("int8", "turbo"):
        both = [patch(each, method, impl="reference") for each in (model, plain)]
        for each in both:
            each.generate(**GREEDY)
        found[f"same_report_{method}"] = report(model).to_dict() == report(plain).to_dict()
        found[f"same_text_{method}"] = str(report(model)) == str(report(plain))
    found["unpatched"] = torch.equal(unpatch(model).generate(**GREEDY), want)
    found["same_weights"] = tensors_of(model) == held
    return found


def other_codes_refused(kind: Kind, folder: Path) -> bool:
    """Whether the cache that `above` saved in `folder` is refused for the same checkpoint with other codes."""
    save(kind, folder, seed=2)
    model = patch(load(kind, folder), "int8", impl="reference")
    model(IDS)
    try:
        QAttnCache.load(folder / "cache.safetensors", model)
    except UnsupportedError as error:
        return "other weights" in str(error)
    return False


def latent(kind: Kind, folder: Path) -> dict[str, bool]:
    """Results of latent attention: refused with a quantized `kv_b_proj`, and served where that is left out."""
    skip, found = ("kv_b_proj",), {}
    save(kind, folder, "deepseek_v3")
    if not kind.plain:
        model, refused = load(kind, folder), []
        for first in (True, False):
            try:
                patch(model, "none")
            except UnsupportedError as error:
                refused.append("kv_b_proj" in str(error) and "leave it out" in str(error))
            else:
                unpatch(model)
            if first and kind.codes:  # a first call may unpack the codes
                model(IDS)
        found["latent_refused"] = refused == [True, True]
    save(kind, folder, "deepseek_v3", skip)
    want = load(kind, folder, skip).generate(**GREEDY)
    found["latent_same_tokens"] = torch.equal(patch(load(kind, folder, skip), "none").generate(**GREEDY), want)
    return found


@torch.no_grad()
def measure(kind: Kind) -> dict[str, bool]:
    """Every result of a kind, by name."""
    with tempfile.TemporaryDirectory() as folder:
        found = above(kind, Path(folder))
        if kind.codes:
            found["other_codes_refused"] = other_codes_refused(kind, Path(folder))
        return found | latent(kind, Path(folder))


def row(name: str) -> dict[str, Any]:
    """The row of a kind: versions of its packages, how it is loaded, and results or the reason why there are none."""
    kind = KINDS[name]
    about: dict[str, Any] = {"weights": name, "packages": {}}
    about["loaded"] = "quantized while loading" if kind.codes is None else "checkpoint"
    about["loaded"] += ", float weights on a CPU" if kind.plain else ""
    try:
        about["packages"] = {package: importlib.metadata.version(package) for package in kind.packages}
        return about | {"results": measure(kind)}
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        return about | {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Packed caches above quantized weights, one JSON row for each kind.")
    parser.add_argument("--only", help="kinds whose name contains this")
    options = parser.parse_args(arguments)
    for name in KINDS:
        if options.only is None or options.only in name:
            print(json.dumps(row(name)), flush=True)


if __name__ == "__main__":
    main()
