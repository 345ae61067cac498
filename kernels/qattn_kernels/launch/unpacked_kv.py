"""What a prefill kernel sees: keys and values of past and new tokens in one uniform, unpacked form, for one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class UnpackedKV(NamedTuple):
    """Slots `N` are those of the arenas: the token at row position `p >= open_start` lies in slot
    `closed * block + p - open_start`, the packed past before it.

    `k`: INT8 `[B, Hkv, N, Dk]` with fp32 `k_scale` `[B, Hkv, N]` if the call multiplies codes, else the model's dtype
    with None.
    `v`: INT8 TRANSPOSED `[B, Hkv, Dv, N]` with fp32 `v_scale` `[B, Hkv, N]`, or the model's dtype `[B, Hkv, N, Dv]`.
    `bias`: fp32 `[B, Hkv, N]`, added to every score: 0, or -inf for slots that hold no token or a masked one.
    `pos`: int32 `[B, N]` row positions. `rows`: int32 `[B, ROW_FIELDS]`: the fields of a `layout.Row`, and behind them
    `ROW_OVERFLOW`. Slots past a row's end hold anything but NaN, with bias -inf, as far as the append covers them;
    behind that nothing was written, so a row's end says what may be read.

    What `ops.prefill.coded` makes codes of may have fewer slots than `bias`, where none beyond is seen, and any strides
    but the last: a cache's own tensors (`step/stock_cache.py`).

    What `ops.prefill.coded` adds: `v` in E4M3 `[B, Hkv, Dv, N]` with fp32 `v_channel` `[B, Hkv, Dv]` instead of token
    scales, around `v_mean` like it; int32 `clean` `[B * Hkv]`, the first masked slot; `k` around `k_mean`
    `[B, Hkv, Dk]`, which smoothed keys have too; queries around `q_mean` `[B, Hq, n, Dk]`, of all (n = 1)
    or of blocks, whose scores `shift` is, `[B, Hq, n, N]`.

    `factors`: of values with scales, the `ops.prefill.value_factors.Factors`, plain, where they are worked out before
    the prefill.
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
    """What kernels that unpack keys and values take of an `UnpackedKV`, in its shapes; any tensor stands for scales
    that it has not."""

    k: Any
    k_scale: Any
    v: Any
    v_scale: Any
    bias: Any
    pos: Any


def tensors(unpacked: UnpackedKV) -> tuple:
    """The `UnpackedTensors` of an `UnpackedKV`, plain: Triton takes longer over a named tuple. Where it has no scales
    its bias stands, which kernels leave alone."""
    k_scale = unpacked.bias if unpacked.k_scale is None else unpacked.k_scale
    v_scale = unpacked.bias if unpacked.v_scale is None else unpacked.v_scale
    return unpacked.k, k_scale, unpacked.v, v_scale, unpacked.bias, unpacked.pos
