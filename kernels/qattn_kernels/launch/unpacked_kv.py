"""Input of a prefill kernel: keys and values of past and new tokens in one uniform, unpacked form, for one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class UnpackedKV(NamedTuple):
    """Unpacked keys and values with `N` slots per head, in the order of the arenas.

    The token at row position `p >= open_start` is in slot `closed * block + p - open_start`; the packed past precedes
    it. Slots after a row's end hold any number but NaN, with bias -inf, as far as the append writes. Later slots are
    uninitialised, so readers stop at the row's end.

    A side that `ops.prefill.coded` quantizes may have fewer slots than `bias`, if no later slot is visible. It may have
    any strides but the last. This allows a cache's own tensors (`step/stock_cache.py`).

    Attributes:
        k: INT8 `[B, Hkv, N, Dk]` if the call multiplies codes, else the model's dtype.
        k_scale: fp32 `[B, Hkv, N]`, or None for unquantized keys.
        v: INT8 transposed `[B, Hkv, Dv, N]`, or the model's dtype `[B, Hkv, N, Dv]`. E4M3 `[B, Hkv, Dv, N]` with
            `v_channel`.
        v_scale: fp32 `[B, Hkv, N]` for INT8 values, else None.
        bias: fp32 `[B, Hkv, N]`, added to every score: 0, or -inf for empty and masked slots.
        pos: int32 `[B, N]`, row positions.
        rows: int32 `[B, ROW_FIELDS]`, fields of a `layout.Row`, then `ROW_OVERFLOW`.
        v_channel, v_mean: fp32 `[B, Hkv, Dv]`, channel scales and mean of FP8 values (from `ops.prefill.coded`).
        clean: int32 `[B * Hkv]`, first masked slot (from `ops.prefill.coded`).
        k_mean: `[B, Hkv, Dk]`, mean subtracted from keys, by `ops.prefill.coded` or a smoothed format.
        q_mean: `[B, Hq, n, Dk]`, mean of all queries (n = 1) or of each block.
        shift: `[B, Hq, n, N]`, scores of `q_mean`.
        factors: a plain `ops.prefill.value_factors.Factors`, if computed before the prefill.
    """

    k: torch.Tensor
    k_scale: torch.Tensor | None
    v: torch.Tensor
    v_scale: torch.Tensor | None
    bias: torch.Tensor
    pos: torch.Tensor
    rows: torch.Tensor
    v_channel: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    clean: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    q_mean: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    factors: tuple[torch.Tensor, ...] | None = None


class UnpackedTensors(NamedTuple):
    """The fields of an `UnpackedKV` that unpacking kernels write, and its `slots` per head. Missing scales are
    placeholders."""

    k: Any
    k_scale: Any
    v: Any
    v_scale: Any
    bias: Any
    pos: Any
    slots: Any


def tensors(unpacked: UnpackedKV) -> tuple:
    """Return the `UnpackedTensors` of an `UnpackedKV` as a plain tuple.

    Triton processes a plain tuple faster than a named one. The bias replaces missing scales; kernels do not touch
    those."""
    k_scale = unpacked.bias if unpacked.k_scale is None else unpacked.k_scale
    v_scale = unpacked.bias if unpacked.v_scale is None else unpacked.v_scale
    return unpacked.k, k_scale, unpacked.v, v_scale, unpacked.bias, unpacked.pos, unpacked.pos.shape[1]
