"""Every accepted setting has an effect: on a layer's storage, or on the part of the arithmetic that it names."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from helpers import PAPERS, Case, constants_of, feed, make_layer, random_qkv, same_state
from pydantic import ValidationError

from qattn_hf import list_methods
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.layer.spec import Compute

# `impl` and `decode` say who computes and how steps are run; `sliding` says which layers are packed
ELSEWHERE = ("impl", "decode", "sliding")
VALUES: dict[str, Any] = {
    "sas_threshold": -4.0,
    "sparse_v_tau": 1e-3,
    "sparse_v_budget": 1.0,
    "crop_horizon": 100,
    "sink_num": 2,
    "sink_window": 5,
    "sink_skip_layers": 99,
    "residual_length": 40,
    "buffer_size": 128,
    "n_h": 0,
    "k_low_heads": [[0]],
    "v_low_heads": [[0]],
    "memory": "1GiB",
    "clip": 0.75,
}
OF_SINKS = ("sink_window", "sink_skip_layers", "sink_select", "sink_exclude", "sink_prefill")
BESIDE: dict[str, dict[str, Any]] = {
    **{field: {"sink_num": 1} for field in OF_SINKS},
    **{field: {"bits": "mixed"} for field in ("n_h", "k_low_heads", "v_low_heads")},
    "norm_block": {"k_format": "turbo4"},
}


def choices(annotation: Any) -> list[Any]:
    """The values of a `Literal`, of a union of them, or of a bool."""
    if annotation is bool:
        return [True, False]
    found: list[Any] = []
    for part in get_args(annotation):
        found += choices(part) if get_args(part) else [part] if not isinstance(part, type) else []
    return found


SETTINGS = [(method, field) for method in list_methods() for field in get_method(method).model_fields]
SETTINGS += [
    (paper.name(), field) for paper in PAPERS for field in paper.__annotations__ if field in paper.model_fields
]


@pytest.mark.parametrize(("method", "field"), [pair for pair in SETTINGS if pair[1] not in ELSEWHERE])
def test_every_setting_reaches_the_layer(method: str, field: str):
    """Some value makes another layer, unless all values but one are refused."""
    preset, beside = get_method(method), BESIDE.get(field, {})
    values = choices(preset.model_fields[field].annotation)
    values = [preset.model_fields[field].default, VALUES[field]] if field in VALUES else values
    found = []
    for value in values:
        try:
            found.append(preset(**{**beside, field: value}).last_layer_spec(2))
        except ValidationError as error:
            assert field in str(error)
    assert len(found) == 1 or any(spec != found[0] for spec in found[1:])


SAGE: Case = ("sage2", {"bits": 4})
# of each field another value, in a layer where it acts, and which calls it changes
EFFECTS: dict[str, tuple[Case, dict[str, Any], tuple[bool, bool]]] = {
    "prefill": (("int8", {}), {"prefill": "model"}, (True, False)),
    "decode": (("int8", {}), {"decode": "model"}, (False, True)),
    "pv": (("int8", {}), {"pv": "model"}, (True, True)),
    "softmax": (("none", {}), {"softmax": "sas"}, (True, True)),
    "sas_threshold": (("none", {"softmax": "sas"}), {"sas_threshold": -1.0}, (True, True)),
    "p_scale": (("turbo", {}), {"p_scale": "tile"}, (True, False)),
    "block_q": (("turbo", {}), {"block_q": 32}, (True, False)),
    "q_scale": (SAGE, {"q_scale": "token"}, (True, False)),
    "k_scale": (SAGE, {"k_scale": "token"}, (True, False)),
    "smooth_k": (SAGE, {"smooth_k": False}, (True, False)),
    "smooth_q": (SAGE, {"smooth_q": "none"}, (True, False)),
    "smooth_v": (SAGE, {"smooth_v": True}, (True, False)),
    "decode_levels": (("turbo", {}), {"decode_levels": 127}, (False, True)),
    "qk_levels": (("turbo", {}), {"qk_levels": 127}, (True, False)),
    "pv_levels": (("turbo", {}), {"pv_levels": 127}, (True, True)),
    "round_sum": (("int_flash", {}), {"round_sum": False}, (True, True)),
    "rotate": (("int8", {}), {"rotate": "hadamard"}, (True, True)),
    "rotate_v": (("int8", {}), {"rotate_v": "hadamard"}, (True, True)),
    "equalize": (("int8", {"rotate_k": "hadamard"}), {"equalize": True}, (True, True)),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Compute)])
def test_arithmetic_changes_the_calls_it_names(field: str):
    """And never what is stored, but for rotations and what comes before them."""
    case, change, changed = EFFECTS[field]
    q, k, v = random_qkv(1, 140)
    plain = make_layer(case)
    spec = dataclasses.replace(plain.spec, compute=dataclasses.replace(plain.spec.compute, **change))
    other = QAttnLayer(spec, 512)
    other.constants = constants_of(spec)
    for calls, differs in zip(([130], [131, 135, 140]), changed, strict=True):
        start = int(plain.get_seq_length()) if plain.is_initialized else 0
        rest = [x[:, :, start:] for x in (q, k, v)]
        outs = [feed(layer, *rest, [end - start for end in calls]) for layer in (plain, other)]
        assert torch.equal(*outs) is not differs
    assert bool(same_state(plain, other)) is field.startswith(("rotate", "equalize"))
