"""Caches in files: a prefix read once, mapped from a safetensors file and copied at the first write.

A packed layer is stored as one tensor of bytes, its arena without spare blocks. An unpacked layer is stored as the
tensors that Transformers keeps. The metadata contain a JSON header, `qattn`, and its SHA-256:

- `format`, `qattn`: versions of the file format and of the package. `method`, `recipe`: the recipe, also as YAML.
- `model`: identity of the model that wrote the cache (`writer.identity`).
- `rows`, `tokens`: of the whole cache, padding included.
- `layers`: the layout of each packed layer, or the state of each unpacked one.
- `offsets`: modules that read the conversation's offsets of positions (`generate/offsets.py`), if known.
- `digests`: SHA-256 of each tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from qattn_hf._version import __version__
from qattn_hf.attention.masks import check_earlier_mask
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.layer import changes
from qattn_hf.layer.budget_layer import BudgetLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.memory_budget import at_stage
from qattn_hf.layer.model_layer import ModelLayer, host_state, restore, state_tensors
from qattn_hf.messages import shown
from qattn_hf.model.device import device_of
from qattn_hf.model.tensor_parallel import ALL, shard_of
from qattn_hf.recipes.recipe import Recipe
from qattn_hf.saved.checks import check_tensors, checked_specs
from qattn_hf.saved.checks import geometry_of as _geometry
from qattn_hf.saved.checks import places_digest as _places
from qattn_hf.saved.header import FORMAT, Tensors, altered, opened, write
from qattn_hf.saved.in_force import in_force
from qattn_hf.saved.writer import Writer, check_writer, difference, identity, layer_devices
from qattn_kernels.layer.arena import Layout


class Saveable(Protocol):
    """The part of a `QAttnCache` that saving needs. `QAttnCache` documents each member."""

    layers: list[Any]
    recipe: Recipe
    writer: Writer
    conversation: Any
    input_ids: torch.Tensor | None

    def get_seq_length(self) -> Any: ...

    def check_whole(self) -> None: ...


def save(cache: Saveable, path: str | Path, input_ids: torch.Tensor | None = None) -> None:
    """Write a cache to a file; see `QAttnCache.save`."""
    model = cache.writer.model
    if model is None:
        raise QAttnError(
            "the model that wrote this cache is not known: it made no call with it, or was freed, or the cache comes "
            "from a pickle. Save the cache while its model exists"
        )
    _check_shard(model)
    if any(isinstance(layer, BudgetLayer) and layer.spec != at_stage(layer.spec, 0) for layer in cache.layers):
        raise UnsupportedError(
            "a cache that reached its memory= limit has blocks of fewer bits and is not saved. Fix: raise memory=, or "
            "patch with bits= alone for a prefix that others read"
        )
    cache.check_whole()
    check_earlier_mask(cache, wait=True)
    check_writer(cache, model, 0)
    tokens = int(cache.get_seq_length())
    if not tokens:
        raise QAttnError("the cache holds no tokens: run the model with it before it is saved")
    batch = next(layer.batch for layer in cache.layers if layer.batch is not None)
    tensors: Tensors = {}
    if input_ids is not None:
        _check_read(input_ids, batch, tokens)
        tensors["input_ids"] = input_ids.to("cpu", torch.int64).contiguous()
    layers = []
    for i, layer in enumerate(cache.layers):
        row, stored = _layer_out(layer)
        layers.append(row)
        tensors |= {f"{i}.{name}": tensor for name, tensor in stored.items()}
    offsets = cache.conversation.offsets
    tensors |= {f"offset.{n}": x.to("cpu", torch.int64).contiguous() for n, x in offsets.items() if x is not None}
    header = {
        "format": FORMAT,
        "qattn": __version__,
        "method": cache.recipe.method,
        "recipe": cache.recipe.as_yaml(),
        "model": identity(model),
        "rows": batch,
        "tokens": tokens,
        "layers": layers,
        "offsets": [*offsets],
        "digests": {name: _digest(tensor) for name, tensor in tensors.items()},
    }
    write(path, header, tensors)


def _check_read(input_ids: torch.Tensor, batch: int, tokens: int) -> None:
    """Check that `input_ids` can be the tokens of a cache with `batch` rows."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        raise QAttnError(f"input_ids are {shown(input_ids)}: give the tokens as a tensor of whole numbers")
    if tuple(input_ids.shape) != (batch, tokens):
        raise QAttnError(
            f"input_ids are {tuple(input_ids.shape)} and the cache holds {(batch, tokens)}: give the tokens that the "
            "cache has read, all rows of them"
        )


def _layer_out(layer: QAttnLayer | ModelLayer) -> tuple[dict[str, Any], Tensors]:
    """Return a layer's entry in the header, and its tensors on the CPU."""
    own = {name: tensor.cpu().clone().contiguous() for name, (tensor, _) in state_tensors(layer).items()}
    if isinstance(layer, ModelLayer):
        return {"own": asdict(layer.spec), "host": host_state(layer)}, own
    row: dict[str, Any] = {"spec": layer.spec.encode(), "host": host_state(layer)}
    if not layer.is_initialized:  # the model does not use this layer
        return row, own
    slots = layer._slots_used()
    small = changes.with_blocks(layer, max(1, -(-slots // layer.spec.window.block)))
    assert small.geometry is not None and small.arena is not None
    dtype = str(small.geometry.dtype).removeprefix("torch.")
    row |= {"geometry": asdict(small.geometry) | {"dtype": dtype}}
    return {**row, "places": _places(Layout(small.geometry, small.spec))}, {"arena": small.arena.cpu(), **own}


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at an address that any dtype can view. A tensor already at such an address stays mapped."""
    return tensor.clone() if tensor.data_ptr() % 8 else tensor


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def read_header(path: str | Path) -> dict[str, Any]:
    """Read the header of a saved cache and check its digest and fields (`header.Header`). Reads no tensor.

    Raises:
        QAttnError: the file is not a complete saved cache, or has another format.
        FileNotFoundError: the file does not exist.
    """
    with opened(path) as (_, header):
        return header


def fill(cache: Saveable, path: str | Path, model: PreTrainedModel, verify: bool) -> None:
    """Fill an empty cache of `model` from a file; see `QAttnCache.load`."""
    _check_shard(model)
    # tensors made under inference_mode could not be written outside it
    with torch.inference_mode(False), opened(path) as (file, header):
        specs = checked_specs(cache.layers, cache.recipe, header, model, path)
        if other := difference(header["model"], identity(model)):
            raise UnsupportedError(f"{path} was saved from another model than this one: {other}")
        if {*file.keys()} != {*header["digests"]}:
            raise altered(path, "the list of its tensors")
        tensors = {name: _aligned(file.get_tensor(name)) for name in header["digests"]}
        if verify:
            for name, digest in header["digests"].items():
                if _digest(tensors[name]) != digest:
                    raise altered(path, f"its tensor {name}")
        slots = check_tensors(cache.layers, specs, header, tensors, model, path)
        devices = layer_devices(model, len(specs))
        for i, (layer, row) in enumerate(zip(cache.layers, header["layers"], strict=True)):
            stored = {name.split(".", 1)[1]: x for name, x in tensors.items() if name.startswith(f"{i}.")}
            if (arena := stored.pop("arena", None)) is not None:
                layer.borrow(arena.to(devices[i]), _geometry(row), specs[i], slots[i])
            # Transformers writes unpacked states in place, so these are copied at once
            restore(layer, {name: tensor.clone().to(devices[i]) for name, tensor in stored.items()}, row["host"])
    cache.input_ids, offsets = tensors.get("input_ids"), {n: tensors.get(f"offset.{n}") for n in header["offsets"]}
    cache.conversation.take({n: None if x is None else x.clone().to(device_of(model)) for n, x in offsets.items()})
    cache.writer.note(model)
    cache.writer.in_force = in_force(model)


def _check_shard(model: PreTrainedModel) -> None:
    if shard_of(model) != ALL:
        raise UnsupportedError(
            "the model is split by tensor parallelism, where each process has a part of every row's heads: a cache is "
            "saved and loaded with the whole model, on one device or with a device map"
        )
