"""Static scales of keys and values that a checkpoint brings (`scales: checkpoint`).

compressed-tensors and vLLM name them `layers.N.self_attn.k_scale`, ModelOpt `layers.N.self_attn.k_proj.k_scale`, Quark
`layers.N.self_attn.k_proj.output_scale`. Older checkpoints have one `kv_scale` for both sides. Transformers ignores
these tensors, so they are read from the files. A number is stored as `number / scale`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.tensor_parallel import shard_of
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State

NAME = re.compile(r"\.(\d+)\.(?:\w+\.)*(?:([kv])_scale|([kv])_proj\.output_scale|kv_scale)$")
KINDS = {"fp8": "float8", "int8": "int8"}  # what a checkpoint calls the numbers of our formats
Scales = dict[tuple[int, str], torch.Tensor]  # by layer and side, `k` or `v`


def read(model: PreTrainedModel, wanted: dict[int, LayerSpec]) -> dict[int, State]:
    """Return the tensors `k.static` and `v.static`, fp32 `[Hkv]`, of these layers. Without layers, nothing is read.

    Raises:
        UnsupportedError: the checkpoint has no scales, scales of other numbers, or more than one scale for a side.
    """
    if not wanted:
        return {}
    folder = _folder(model)
    kind, shard, found = _kind(folder), shard_of(model), {}
    scales = _scales(folder)
    for i, spec in wanted.items():
        ours = KINDS[spec.k.core.name]
        if kind != ours:
            raise _refused(f"{folder} has scales for a {kind} cache, and {spec.k.core.name} stores {ours}")
        if missing := [side for side in "kv" if (i, side) not in scales]:
            raise _refused(f"{folder} has no {missing[0]}_scale for layer {i}")
        if spec.latent:
            raise _refused(f"layer {i} has latent attention (MLA), which stores no keys and values")
        heads = len(shard.of(head_sizes(model.config, i).kv))
        found[i] = {f"{side}.static": scales[i, side].expand(heads).to(device_of(model)) for side in "kv"}
    return found


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"scales='checkpoint': {why}. Fix: use scales='token', which needs no calibrated scales")


def _folder(model: PreTrainedModel) -> Path:
    """Return the folder of the files from which a model was loaded."""
    name, revision = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
    if name and os.path.isdir(name):
        return Path(name)
    try:  # loading has downloaded the files
        return Path(snapshot_download(name, revision=revision, allow_patterns="*.safetensors", local_files_only=True))
    except (OSError, ValueError):  # not in the local cache, or no name of a repository
        raise _refused(f"the files of {name or 'this model'!r} are not on this machine") from None


def _kind(folder: Path) -> str:
    """Return the numbers that a checkpoint's scales are for, such as `float8`. Configs that do not say mean FP8."""

    def read(name: str, key: str) -> dict[str, Any]:
        path = folder / name
        return (json.loads(path.read_text(encoding="utf-8")).get(key) or {}) if path.is_file() else {}

    scheme = read("config.json", "quantization_config").get("kv_cache_scheme") or {}
    algorithm = read("hf_quant_config.json", "quantization").get("kv_cache_quant_algo") or "FP8"
    default = {"FP8": "float8", "INT8": "int8"}.get(algorithm, algorithm)
    return f"{scheme.get('type', 'float')}{scheme.get('num_bits', 8)}" if scheme else default


def _scales(folder: Path) -> Scales:
    """Return the scales in a folder's safetensors files, fp32 `[1]`."""
    found: Scales = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no dict)
                if (match := NAME.search(name)) is None:
                    continue
                scale = file.get_tensor(name).float().reshape(-1)
                if scale.numel() != 1 or not 0 < scale.item() < torch.inf:
                    raise _refused(f"{name} must be one positive number and has {scale.numel()}: {scale.tolist()[:4]}")
                for side in match[2] or match[3] or "kv":
                    if not torch.equal(found.setdefault((int(match[1]), side), scale), scale):
                        raise _refused(f"{name} differs from another scale of its layer")
    return found
