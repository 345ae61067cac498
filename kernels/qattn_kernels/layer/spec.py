"""What a layer stores and how it computes: frozen, hashable, and written as text so that an operator can carry it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from qattn_kernels.formats import Format, get_format
from qattn_kernels.formats.base import INT8_LEVELS
from qattn_kernels.layout import SinkPool, Window

SHORT_CALL = 32  # calls of at most this many tokens append first and read the cache as single steps would


@dataclass(frozen=True)
class Compute:
    """Arithmetic of the attention over what is stored.

    Attributes:
        prefill, decode: `int8` (products of 8-bit integers) or `model` (floating point over the dequantized format).
        pv: the product with values where the one with keys is `int8`: that too, `model`, or in a prefill `e4m3` or
            `e5m2`: weights and values in FP8, values with a scale a channel of all that the call sees.
        softmax: `exact` or `sas` (algorithm SAS of TurboAttention, cut at `sas_threshold`).
        p_scale: INT8 weights of a prefill have a scale a query and tile (`row`), or one that `block_q` queries share
            (`tile`, TurboAttention's).
        q_scale: what shares the INT8 scale of queries in a prefill: `block` of `block_q`, or as `granularity` says.
        k_scale: what shares the scale of keys that have no codes, in a prefill: as `granularity` says.
        smooth_k: from keys that have no codes a prefill subtracts the mean of all that the call sees.
        smooth_q: from queries a prefill subtracts the mean of all (`tensor`) or of `QUERY_BLOCK` (`block`); or `none`.
        smooth_v: from values in FP8 a prefill subtracts the mean of all that the call sees.
        decode_levels: largest INT8 code of queries in a decode.
        qk_levels, pv_levels: largest INT8 code of queries in a prefill and of weights, and of keys and values that
            have no codes.
        round_sum: row sums are of the rounded INT8 weights, not of what they were rounded from.
        rotate: `hadamard` rotates queries and keys before anything else (`ops/rotate`), `none` does not.
        rotate_v: `hadamard` rotates values, and the output back; `none` does not.
        equalize: before they are rotated, keys are multiplied by one constant a channel, the state's `k.equalizer`, and
            queries by its inverse.
    """

    prefill: str = "int8"
    decode: str = "int8"
    softmax: str = "exact"
    sas_threshold: float = -6.0
    p_scale: str = "row"
    block_q: int = 64
    q_scale: str = "block"
    k_scale: str = "token"
    smooth_k: bool = False
    smooth_q: str = "none"
    smooth_v: bool = False
    pv: str = "int8"
    qk_levels: int = INT8_LEVELS
    decode_levels: int = INT8_LEVELS
    pv_levels: int = INT8_LEVELS
    round_sum: bool = False
    rotate: str = "none"
    rotate_v: str = "none"
    equalize: bool = False


@dataclass(frozen=True)
class Sparsity:
    """Sparse V: a decode skips values whose weight is below `tau`, up to a dropped mass of `budget` a row: the output
    moves by at most `budget * max|V|`. `tau = 0` is off, a `budget` of infinity the paper's. Row sums keep all weights.

    The reference judges every weight by the final row sum. A kernel judges whole blocks while it reads them, never the
    ring or sinks: it skips one if for all queries of the program its largest weight is below `tau` of a row sum, that
    of the program's part of the context so far and of the context's first block (or of the sinks), and what the part
    drops stays within the budget of its own row sum and of a share of that block's. Sums only grow, so no weight above
    `tau` is skipped and the mass stays within the budget; but a kernel skips less than the threshold allows.
    """

    tau: float = 0.0
    budget: float = 1e-4


@dataclass(frozen=True)
class LayerSpec:
    """The four choices of one layer: format of K and of V, window with its sink pool, compute, sparsity; and who
    computes it: `impl` is `reference` or `triton`.

    `latent`: of multi-head latent attention, one KV head whose V is the latent and whose K is the RoPE part. Keys are
    the two together, latent first, and products are in floating point.
    """

    k: Format
    v: Format
    window: Window = field(default_factory=Window)
    compute: Compute = field(default_factory=Compute)
    sparsity: Sparsity = field(default_factory=Sparsity)
    sink_pool: SinkPool = field(default_factory=SinkPool)
    impl: str = "reference"
    latent: bool = False

    def encode(self) -> str:
        """One line of JSON that `decode_spec` reads back: operators take text where they cannot take objects."""

        def plain(part: Any) -> Any:
            if not dataclasses.is_dataclass(part):
                return part
            fields = {f.name: plain(getattr(part, f.name)) for f in dataclasses.fields(part)}
            return {"name": part.name, **fields} if isinstance(part, Format) else fields

        return json.dumps(plain(self), sort_keys=True)


def _format(settings: dict[str, Any]) -> Format:
    def read(value: Any) -> Any:
        return _format(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value

    found = {key: read(value) for key, value in settings.items()}
    return get_format(found.pop("name"))(**found)


@lru_cache(maxsize=1024)
def decode_spec(text: str) -> LayerSpec:
    """The layer that `LayerSpec.encode` wrote as `text`."""
    parts = json.loads(text)
    return LayerSpec(
        k=_format(parts["k"]),
        v=_format(parts["v"]),
        window=Window(**parts["window"]),
        compute=Compute(**parts["compute"]),
        sparsity=Sparsity(**parts["sparsity"]),
        sink_pool=SinkPool(**parts["sink_pool"]),
        impl=parts["impl"],
        latent=parts["latent"],
    )
