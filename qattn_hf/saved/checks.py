"""Checks of a saved cache before a layer takes it. Kernels trust the numbers in a cache.

Digests show that a file is unchanged, not who saved it. So no memory place from a file is trusted. Sizes are compared
with the model and the tensors; lengths and places are compared with the sizes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf._version import __version__
from qattn_hf.errors import LONGEST_MESSAGE, QAttnError, RecipeError, UnsupportedError
from qattn_hf.layer.hybrid_layer import HybridLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.model_layer import STATE, ModelLayer, host_state
from qattn_hf.messages import cut
from qattn_hf.model.heads import HeadSizes, head_sizes
from qattn_hf.recipes.yaml_reader import parse_yaml
from qattn_hf.saved.header import DTYPES, Tensors, unusable
from qattn_kernels.layer.arena import Layout, places, views
from qattn_kernels.layer.sound import MOST_COLUMNS, slots_used, unsound, within
from qattn_kernels.layout import Geometry

MOST_HORIZON = 2**20  # tokens of a ring; the size of the arena bounds it too


def geometry_of(row: dict[str, Any]) -> Geometry:
    """Return the geometry of a packed layer in the file."""
    return Geometry(**row["geometry"] | {"dtype": DTYPES[row["geometry"]["dtype"]]})


def checked_specs(
    layers: list[Any], recipe: Any, header: dict[str, Any], model: PreTrainedModel, path: str | Path
) -> list[Any]:
    """Return the spec of each layer in the file.

    Each must equal the cache's spec, except for choices that change no stored byte: kernels or reference, and a longer
    ring of open tokens.

    Raises:
        UnsupportedError: another recipe, other layers, or other head sizes than the model's.
        QAttnError: another version of the package laid out the arena.
    """
    if len(header["layers"]) != len(layers):
        raise UnsupportedError(f"{path} has {len(header['layers'])} layers and the model {len(layers)}")
    specs = [_spec(layer, row) for layer, row in zip(layers, header["layers"], strict=True)]
    if None in specs:
        raise UnsupportedError(
            f"{path} was saved by {_in_one_line(header['recipe'])} and the model is patched with "
            f"{_in_one_line(recipe.as_yaml())}, which differ in layer {specs.index(None)}: patch the model with "
            "the file's recipe, or save the cache anew"
        )
    for i, row in enumerate(header["layers"]):
        if sizes := row.get("geometry"):
            theirs, ours = (sizes["heads"], sizes["k_dim"], sizes["v_dim"]), head_sizes(model.config, i)
            if theirs != (ours.kv, ours.dim, ours.v_dim):
                raise UnsupportedError(
                    f"layer {i} of {path} has {theirs[0]} KV heads of {theirs[1]} and {theirs[2]} channels and the "
                    f"model {ours.kv} of {ours.dim} and {ours.v_dim}: load the file with the model that saved it"
                )
            if row.get("places") != places_digest(Layout(geometry_of(row), specs[i])):
                raise QAttnError(
                    f"{path} was written by qattn-hf {header['qattn']}, whose tensors have another layout than in "
                    f"{__version__}. Save the cache anew"
                )
    return specs


def places_digest(layout: Layout) -> str:
    """Return a digest of the places of all state tensors in an arena. Versions of the package may differ in it."""
    return hashlib.sha256(repr(places(layout)).encode()).hexdigest()


def _spec(layer: QAttnLayer | ModelLayer, row: dict[str, Any]) -> Any:
    """Return the spec of one layer; None if the file's spec differs."""
    if isinstance(layer, ModelLayer) or "own" in row:
        return layer.spec if isinstance(layer, ModelLayer) and row.get("own") == asdict(layer.spec) else None
    try:
        theirs = json.loads(row["spec"])
        horizon = theirs["window"]["horizon"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if type(horizon) is not int or not 0 <= horizon <= MOST_HORIZON:
        return None
    window = replace(layer.spec.window, horizon=max(horizon, layer.spec.window.horizon))
    spec = replace(layer.spec, window=window)
    return spec if json.loads(spec.encode()) == theirs | {"impl": spec.impl} else None


def _in_one_line(yaml_text: str) -> str:
    """Return a recipe's YAML as `{method: turbo, bits: 2}`; other text is returned shortened."""
    try:
        recipe = parse_yaml(yaml_text, "the recipe")
        text = json.dumps(recipe).replace('"', "")
    except (RecipeError, TypeError, ValueError):
        text = " ".join(yaml_text.split())
    return cut(text, LONGEST_MESSAGE // 4)


def check_tensors(
    layers: list[Any],
    specs: list[Any],
    header: dict[str, Any],
    tensors: Tensors,
    model: PreTrainedModel,
    path: str | Path,
) -> list[int]:
    """Check that tensors match the layers and the header's sizes, and that states of packed layers are sound.

    Args:
        layers: layers of the empty cache.
        specs: result of `checked_specs`.
        tensors: on the CPU, of any shape and dtype.

    Returns:
        for each layer the slots of its fullest row; 0 for a layer without an arena.

    Raises:
        QAttnError: something does not match; the message names it.
    """
    left, slots = {**tensors}, [0] * len(layers)
    _check_tokens(left, header, path)
    for i, (layer, row) in enumerate(zip(layers, header["layers"], strict=True)):
        stored = {name.split(".", 1)[1]: left.pop(name) for name in [*left] if name.startswith(f"{i}.")}
        if (arena := stored.pop("arena", None)) is not None or row.get("geometry"):
            if isinstance(layer, ModelLayer) or arena is None or not row.get("geometry"):
                raise unusable(path, f"layer {i} has an arena without sizes, or sizes without an arena")
            slots[i] = _check_arena(arena, Layout(geometry_of(row), specs[i]), header, f"layer {i}", path)
        _check_own(layer, row["host"], stored, header, f"layer {i}", path)
        if {"keys", "values"} & {*stored}:
            _check_window(layer, row["host"], stored, header["tokens"], head_sizes(model.config, i), f"layer {i}", path)
    if left:
        raise unusable(path, f"no layer has a tensor {cut(next(iter(left)), 100)}")
    return slots


def _check_arena(arena: torch.Tensor, layout: Layout, header: dict[str, Any], where: str, path: str | Path) -> int:
    if layout.geometry.batch != header["rows"]:
        raise unusable(path, f"{where} has {layout.geometry.batch} rows and the file {header['rows']}")
    n_bytes = places(layout)[1]
    if arena.dtype != torch.uint8 or arena.shape != (n_bytes,):
        raise unusable(path, f"{where} takes {n_bytes} bytes and its arena is {_shape(arena)}")
    state = views(arena, layout)
    if wrong := unsound(state, layout, header["tokens"]):
        raise unusable(path, f"{where}: {wrong}")
    return slots_used(state, layout.spec.window.block)


def _check_tokens(left: Tensors, header: dict[str, Any], path: str | Path) -> None:
    """Check the tokens and the offsets of their positions, and take them out of the tensors that are left."""
    rows, tokens = header["rows"], header["tokens"]
    if (ids := left.pop("input_ids", None)) is not None and (ids.dtype, *ids.shape) != (torch.int64, rows, tokens):
        raise unusable(path, f"input_ids are {_shape(ids)} in place of int64 {(rows, tokens)}")
    for name in header["offsets"]:
        x = left.pop(f"offset.{name}", None)
        if x is None:
            continue
        if (x.dtype, *x.shape) != (torch.int64, rows, 1) or not within(x, -MOST_COLUMNS, MOST_COLUMNS):
            raise unusable(path, f"offsets of positions are {_shape(x)}, or too far")


def _check_own(
    layer: Any, host: dict[str, Any], stored: Tensors, header: dict[str, Any], where: str, path: str | Path
) -> None:
    """Check an unpacked layer's state: its names, its rows, and the types of its attributes."""
    own = isinstance(layer, (ModelLayer, HybridLayer))
    fresh = host_state(layer) if own else {}
    if {*host} != {*fresh} or any(_count(host[name]) != _count(fresh[name]) for name in fresh):
        raise unusable(path, f"{where} has other attributes than {', '.join(sorted(fresh)) or 'none'}")
    for name, x in stored.items():
        if not (own and _has_state(layer, name)):
            raise unusable(path, f"{where} has no tensor {cut(name, 100)}")
        if not x.is_floating_point() or x.dim() < 2 or x.shape[0] != header["rows"] or not x.numel():
            raise unusable(path, f"{name} of {where} is {_shape(x)}")
    for states in ("conv_states", "recurrent_states"):
        if f"is_{states}_initialized" in host and not _agree(states, host, stored):
            raise unusable(path, f"{states} of {where} do not match its attributes")


def _has_state(layer: Any, name: str) -> bool:
    """Whether a fresh layer has room for a state of this name: `conv_states`, or `conv_states.0` of several."""
    states, _, part = name.partition(".")
    empty = vars(layer).get(states) if states in STATE else ()
    return part in map(str, empty) if isinstance(empty, dict) else empty is None and not part


def _agree(states: str, host: dict[str, Any], stored: Tensors) -> bool:
    """Whether the states of linear attention that are there are those that the attributes tell of, and long enough."""
    flags, sizes = host[f"is_{states}_initialized"], host["conv_kernel_size"]
    for i, (there, size) in enumerate(zip(flags, sizes, strict=True)):
        state = stored.get(f"{states}.{i}")
        if (state is not None) is not there:
            return False
        if states == "conv_states" and state is not None and (size is None or size > state.shape[-1]):
            return False
    return True


def _check_window(
    layer: Any, host: dict[str, Any], stored: Tensors, tokens: int, sizes: HeadSizes, where: str, path: str | Path
) -> None:
    """Check the keys and values of a window, for rows of `tokens` tokens."""
    keys, values = (stored.get(name, torch.empty(0, device="cpu")) for name in ("keys", "values"))
    shapes = [(sizes.kv, x.shape[2], dim) for x, dim in ((keys, sizes.dim), (values, sizes.v_dim)) if x.dim() == 4]
    if [tuple(x.shape[1:]) for x in (keys, values)] != shapes or keys.shape[2] != values.shape[2]:
        raise unusable(path, f"keys and values of {where} are {_shape(keys)} and {_shape(values)}")
    least, most = min(tokens, layer.sliding_window - 1), tokens if host.get("record_past") else layer.sliding_window - 1
    if host.get("cumulative_length") != tokens or not least <= keys.shape[2] <= most:
        raise unusable(path, f"{where} has other tokens than the {tokens} of the file")


def _count(value: Any) -> int:
    """Return the length of a list; -1 for anything else."""
    return len(value) if isinstance(value, list) else -1


def _shape(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
