"""Settings for tests of kernels.

The interpreter is slow, so the methods named here have a selection. Every other method has its defaults and variants,
if kernels compute them.
"""

from __future__ import annotations

import torch
from helpers import SAGE1, Case, cases

from qattn_hf.recipes.settings import known
from qattn_kernels.layer.scores import Scores

TURBO: Case = ("turbo", {})
INT8: Case = ("int8", {})
NONE: Case = ("none", {})
KIVI: Case = ("kivi", {"bits": 4, "group_size": 64, "residual_length": 0})
OF_NAMED: list[Case] = [  # the same formats in other arithmetic, or with other scales
    ("turbo", {"bits": "mixed"}),
    ("turbo", {"k_bits": 4, "v_bits": 2, "softmax": "sas", "sas_threshold": -1e9, "rotate_k": "hadamard"}),
    ("turbo", {"rotate_k": "hadamard", "equalize_k": True}),
    ("turbo", {"compute": "model", "buffer_size": 128}),
    ("turbo", {"v_scale": "token", "bits": "mixed", "clip": 1.0}),
    ("kivi", {"bits": 4, "group_size": 64, "residual_length": 0, "token_norm": True}),
    ("kivi", {"bits": 2, "group_size": 64, "residual_length": 0, "token_norm": True, "compensate_k": True}),
    (
        "sinkq",
        {
            **{"residual_length": 0, "sink_num": 2, "rotate_k": "hadamard", "clip": 0.75},
            **{"compensate_k": True, "equalize_k": True},
        },
    ),
    ("turboquant", {"k_format": "turbo4", "rotate": "hadamard", "equalize_k": True}),
    ("int_flash", {"bits": 4, "rotate": "hadamard", "equalize_k": True}),
    ("kivi", {"bits": 3, "group_size": 64, "residual_length": 0}),
    ("kivi", {"bits": 3, "group_size": 128, "residual_length": 0}),  # whose values are multiplied a quarter at a time
]
SMOOTHED: list[Case] = [
    ("sage2", {"bits": 4, "granularity": "block", "smooth_q": "block", "smooth_v": True}),
    ("turbo", {"smooth_k": True}),
]
BY_CHANNELS: list[Case] = [  # groups of channels, in several arrangements: each head dim is a separate case
    ("turboquant", {}),
    ("turboquant", {"k_format": "turbo3", "v_format": "turbo2", "norm_block": None}),
    ("int_flash", {}),
    ("int_flash", {"mode": "half", "bits": 4}),
    ("sage2", {}),
    *SMOOTHED,
]
FORMATS: list[Case] = [
    TURBO,
    INT8,
    NONE,
    KIVI,
    ("kivi", {"k_bits": 2, "v_bits": 4, "residual_length": 20, "rotate_k": "hadamard", "rotate_v": "hadamard"}),
    ("fp8", {}),
    ("sinkq", {"group_size": 64, "residual_length": 0, "sink_num": 2, "sink_window": 1, "clip": 0.75}),
    ("turbo", {"bits": "mixed", "sink_num": 2}),
    *BY_CHANNELS,
]
NAMED = {method for method, _ in FORMATS}
FOUND = [case for case in cases() if case[0] not in NAMED and known(case[0], **case[1])]  # of every other method
FORMATS += FOUND
BY_CHANNELS += FOUND
CASES: list[Case] = [*FORMATS, *OF_NAMED]
TWO_BITS: Case = ("turbo", {"bits": 2})
LONG: list[Case] = [
    ("turbo", {"smooth_k": True, "block_kv": 128, "buffer_size": 128, "v_bits": 2}),
    ("kivi", {"bits": 4, "group_size": 64, "residual_length": 0, "prefill_compute": "int8"}),
]
MORE_CASES: list[Case] = [
    TWO_BITS,
    ("turbo", {"block_kv": 128, "buffer_size": 128}),
    ("turbo", {"bits": "mixed", "k_low_heads": [[1]], "v_low_heads": [[0]]}),
    ("turbo", {"bits": "mixed", "priority": "min_max"}),
    ("turbo", {"bits": "mixed", "priority": "variation", "n_h": 1}),
    ("int8", {"compute": "model", "rotate_v": "hadamard"}),
    ("none", {"softmax": "sas", "sas_threshold": -1e9}),
    ("int_flash", {"bits": 4, "softmax": "sas", "sas_threshold": -1e9}),
    ("int_flash", {"mode": "half"}),
    ("int_flash", {"compute": "model"}),
    ("kivi", {"group_size": 128, "residual_length": 32}),
    ("kivi", {"bits": 4, "group_size": 128, "residual_length": 128}),
    ("sinkq", {"group_size": 32, "bits": 3}),
    ("sinkq", {"group_size": 32, "bits": 4, "rotate_k": "hadamard", "rotate_v": "hadamard", "equalize_k": True}),
    ("sinkq", {"group_size": 128, "token_norm": True, "clip": 0.75}),
    ("turbo", {"sink_num": 3, "sink_window": 1}),
    ("turbo", {"compute": "model", "sink_window": 1}),
    ("turbo", {"v_scale": "token", "bits": 2, "block_kv": 128, "buffer_size": 128, "clip": 0.75}),
    ("turbo", {"v_scale": "token", "compute": "model", "k_bits": 4, "v_bits": 2, "rotate_v": "hadamard"}),
    ("turboquant", {"k_format": "turbo4", "v_format": "q8"}),
    ("turboquant", {"k_format": "turbo2", "v_format": "turbo3", "norm_block": 64}),
    ("turboquant", {"k_format": "q4", "v_format": "q4"}),
    ("turboquant", {"k_format": "model", "v_format": "turbo4"}),
    ("turboquant", {"k_format": "turbo4", "v_format": "model"}),
    ("sage2", SAGE1),
    ("sage2", {"bits": 4, "granularity": "token", "smooth_k": False, "pv": "model"}),
    ("int8", {"smooth_k": True}),
    ("int_flash", {"bits": 4, "smooth_k": True}),
    *LONG,
]

# every kind of scores, of four query heads
SCORES = {
    "plain": Scores(0.2),
    "soft cap": Scores(0.2, 5.0),
    "window": Scores(0.2, 0.0, 90),
    "chunk": Scores(0.2, 0.0, -50),
    "learned sinks": Scores(0.2, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}
