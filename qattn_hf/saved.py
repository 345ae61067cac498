"""Caches in files: a prefix that was read once, mapped from a safetensors file and copied where it is written.

A packed layer is one tensor of bytes in the file, its arena without spare blocks; a layer that is the model's own has
the tensors that transformers keeps. The metadata have a header in JSON, `qattn`, and its SHA-256:

- `format`, `qattn`: versions of this form and of the package. `method`, `recipe`: the recipe, also as YAML.
- `model`: which model wrote the cache (`writer.identity`).
- `rows`, `tokens`: of the whole cache, padding included.
- `layers`: for each layer its layout, or what it keeps of the model's own.
- `digests`: SHA-256 of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from qattn_hf import changes
from qattn_hf._version import __version__
from qattn_hf.budget_layer import BudgetLayer
from qattn_hf.errors import LONGEST_MESSAGE, QAttnError, UnsupportedError
from qattn_hf.layer import QAttnLayer
from qattn_hf.memory_budget import at_stage
from qattn_hf.model_layer import ModelLayer, host_state, restore, state_tensors
from qattn_hf.tensor_parallel import ALL, shard_of
from qattn_hf.writer import difference, identity, layer_devices
from qattn_kernels.layer.arena import Layout, places
from qattn_kernels.layer.spec import decode_spec
from qattn_kernels.layout import Geometry

if TYPE_CHECKING:
    from qattn_hf.cache import QAttnCache

FORMAT = 2  # 2: of values in groups smaller than a head every eighth token stands side by side
Tensors = dict[str, torch.Tensor]


def save(cache: QAttnCache, path: str | Path, input_ids: torch.Tensor | None = None) -> None:
    """Write a cache to a file; see `QAttnCache.save`."""
    model = cache.writer.model
    if model is None:
        raise QAttnError(
            "the model that wrote this cache is not known: it made no call with it, or was freed, or the cache comes "
            "from a pickle. Save the cache while its model is there"
        )
    _check_shard(model)
    if any(isinstance(layer, BudgetLayer) and layer.spec != at_stage(layer.spec, 0) for layer in cache.layers):
        raise UnsupportedError(
            "a cache whose blocks have fewer bits for want of room (memory=) is not saved: give it more, or patch with "
            "bits= alone for a prefix that others read"
        )
    cache.check_whole()
    tokens = int(cache.get_seq_length())
    if not tokens:
        raise QAttnError("the cache holds no tokens: run the model with it before it is saved")
    batch = next(layer.batch for layer in cache.layers if layer.batch is not None)
    tensors: Tensors = {}
    if input_ids is not None:
        if tuple(input_ids.shape) != (batch, tokens):
            raise QAttnError(
                f"input_ids are {tuple(input_ids.shape)} and the cache holds {(batch, tokens)}: give the tokens that "
                "the cache has read, all rows of them"
            )
        tensors["input_ids"] = input_ids.to("cpu", torch.int64).contiguous()
    layers = []
    for i, layer in enumerate(cache.layers):
        row, held = _layer_out(layer)
        layers.append(row)
        tensors |= {f"{i}.{name}": tensor for name, tensor in held.items()}
    header = {
        "format": FORMAT,
        "qattn": __version__,
        "method": cache.recipe.method,
        "recipe": cache.recipe.as_yaml(),
        "model": identity(model),
        "rows": batch,
        "tokens": tokens,
        "layers": layers,
        "digests": {name: _digest(tensor) for name, tensor in tensors.items()},
    }
    _write(Path(path), header, tensors)


def _layer_out(layer: QAttnLayer | ModelLayer) -> tuple[dict[str, Any], Tensors]:
    """What the header says of a layer, and its tensors on the CPU."""
    own = {name: tensor.cpu().clone().contiguous() for name, (tensor, _) in state_tensors(layer).items()}
    if isinstance(layer, ModelLayer):
        return {"own": asdict(layer.spec), "host": host_state(layer)}, own
    row: dict[str, Any] = {"spec": layer.spec.encode(), "host": host_state(layer)}
    if not layer.is_initialized:  # a layer that the model does not use
        return row, own
    slots = layer._slots_used()
    small = changes.with_blocks(layer, max(1, -(-slots // layer.spec.window.block)))
    assert small.geometry is not None and small.arena is not None
    dtype = str(small.geometry.dtype).removeprefix("torch.")
    row |= {"geometry": asdict(small.geometry) | {"dtype": dtype}, "slots": slots}
    return {**row, "places": _places(Layout(small.geometry, small.spec))}, {"arena": small.arena.cpu(), **own}


def _geometry(row: dict[str, Any]) -> Geometry:
    """The geometry of a packed layer of the file."""
    return Geometry(**row["geometry"] | {"dtype": getattr(torch, row["geometry"]["dtype"])})


def _places(layout: Layout) -> str:
    """Digest of where each state tensor lies in an arena, which another version of the package may place otherwise."""
    return hashlib.sha256(repr(places(layout)).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _write(path: Path, header: dict[str, Any], tensors: Tensors) -> None:
    """Write the file beside its place and move it there whole: nobody ever sees a part of it."""
    text = json.dumps(header)
    metadata = {"qattn": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, part, metadata)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def read_header(path: str | Path) -> dict[str, Any]:
    """The header of a saved cache, checked against its digest. No tensor is read.

    Raises:
        QAttnError: no whole file of a saved cache, or one of another format.
        FileNotFoundError: there is no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, UnicodeDecodeError) as error:
        raise QAttnError(f"{path} is no whole safetensors file: {error}. Save the cache anew") from None
    text = metadata.get("qattn", "")
    if not text:
        raise QAttnError(f"{path} holds no saved cache: it was not written by QAttnCache.save")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
        raise _altered(path, "its header")
    header: dict[str, Any] = json.loads(text)
    if header["format"] != FORMAT:
        raise QAttnError(
            f"{path} has format {header['format']}, of qattn-hf {header['qattn']}; this is {__version__} with format "
            f"{FORMAT}. Save the cache anew"
        )
    return header


def _altered(path: str | Path, what: str) -> QAttnError:
    return QAttnError(f"{path} was altered after it was saved: {what} has another SHA-256. Save the cache anew")


def fill(cache: QAttnCache, path: str | Path, model: PreTrainedModel, verify: bool) -> None:
    """Put what a file holds into an empty cache of `model`; see `QAttnCache.load`."""
    header = read_header(path)
    _check_shard(model)
    specs = _checked_specs(cache, header, path)
    if other := difference(header["model"], identity(model)):
        raise UnsupportedError(f"{path} was saved from another model than this one: {other}")
    with torch.inference_mode(False), safe_open(path, framework="pt") as file:
        if {*file.keys()} != {*header["digests"]}:
            raise _altered(path, "the list of its tensors")
        tensors = {name: file.get_tensor(name) for name in header["digests"]}
    if verify:
        for name, digest in header["digests"].items():
            if _digest(tensors[name]) != digest:
                raise _altered(path, f"its tensor {name}")
    devices = layer_devices(model, len(specs))
    with torch.inference_mode(False):  # else it could not be written outside of inference mode
        for i, (layer, row) in enumerate(zip(cache.layers, header["layers"], strict=True)):
            held = {name.split(".", 1)[1]: x for name, x in tensors.items() if name.startswith(f"{i}.")}
            if (arena := held.pop("arena", None)) is not None:
                layer.borrow(arena.to(devices[i]), _geometry(row), specs[i], row["slots"])
            # states of the model's own are written in place, by transformers: they are copied at once
            restore(layer, {name: tensor.clone().to(devices[i]) for name, tensor in held.items()}, row["host"])
    cache.input_ids = tensors.get("input_ids")
    cache.writer.note(model)


def _check_shard(model: PreTrainedModel) -> None:
    if shard_of(model) != ALL:
        raise UnsupportedError(
            "the model is split by tensor parallelism, where each process has a part of every row's heads: a cache is "
            "saved and loaded with the whole model, on one device or with a device map"
        )


def _checked_specs(cache: QAttnCache, header: dict[str, Any], path: str | Path) -> list[Any]:
    """The spec of each layer of the file, which must be the cache's own but for what changes no stored byte: kernels or
    reference, and a longer ring of open tokens.

    Raises:
        UnsupportedError: another recipe or other layers.
        QAttnError: an arena that another version of the package laid out.
    """
    if len(header["layers"]) != len(cache.layers):
        raise UnsupportedError(f"{path} has {len(header['layers'])} layers and the model {len(cache.layers)}")
    specs: list[Any] = []  # None: another one
    for layer, row in zip(cache.layers, header["layers"], strict=True):
        if isinstance(layer, ModelLayer) or "own" in row:
            own = asdict(layer.spec) if isinstance(layer, ModelLayer) else None
            specs.append(layer.spec if row.get("own") == own else None)
            continue
        theirs = json.loads(row["spec"])
        window = replace(layer.spec.window, horizon=max(theirs["window"]["horizon"], layer.spec.window.horizon))
        spec = replace(layer.spec, window=window)
        specs.append(spec if json.loads(spec.encode()) == theirs | {"impl": spec.impl} else None)
        if "places" in row and row["places"] != _places(Layout(_geometry(row), decode_spec(row["spec"]))):
            raise QAttnError(
                f"{path} was written by qattn-hf {header['qattn']}, which lays tensors out otherwise than this "
                f"{__version__}. Save the cache anew"
            )
    if None in specs:
        raise UnsupportedError(
            f"{path} was saved by {_in_one_line(header['recipe'])} and the model is patched with "
            f"{_in_one_line(cache.recipe.as_yaml())}, which differ in layer {specs.index(None)}: patch the model with "
            "the file's recipe, or save the cache anew"
        )
    return specs


def _in_one_line(yaml_text: str) -> str:
    """A recipe's YAML as `{method: turbo, bits: 2}`."""
    return yaml.safe_dump(
        yaml.safe_load(yaml_text), sort_keys=False, default_flow_style=True, width=LONGEST_MESSAGE
    ).strip()
