"""Storage and arithmetic of a layer: frozen, hashable, and encodable as text for operators."""

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
    """Arithmetic of the attention over stored tokens.

    Attributes:
        prefill, decode: `int8` (products of 8-bit integers) or `model` (floating point over the dequantized format).
        pv: arithmetic of the product with values, where the product with keys is `int8`: `int8` or `model`. A prefill
            also takes `e4m3` or `e5m2`: weights and values in FP8, values with one scale per channel over all visible
            tokens.
        softmax: `exact` or `sas` (algorithm SAS of TurboAttention, cut at `sas_threshold`).
        sas_threshold: SAS gives weight 0 to scores below the maximum plus this, in natural log units.
        p_scale: scale of a prefill's INT8 weights: one per query and tile (`row`), or one per `block_q` queries
            (`tile`, as in TurboAttention).
        block_q: queries per block in a prefill.
        q_scale: queries that share an INT8 scale in a prefill: `block` (of `block_q`), or as in `granularity`.
        k_scale: keys that share a scale in a prefill, if the format does not quantize them: as in `granularity`.
        smooth_k: a prefill subtracts the mean of all visible keys from unquantized keys.
        smooth_q: a prefill subtracts the mean of all queries (`tensor`) or of each `QUERY_BLOCK` (`block`); or `none`.
        smooth_v: a prefill subtracts the mean of all visible values from FP8 values.
        decode_levels: largest INT8 code of queries in a decode.
        qk_levels: largest INT8 code in a prefill of queries, and of keys that the format does not quantize.
        pv_levels: largest INT8 code of weights, and of values that the format does not quantize.
        round_sum: row sums use the rounded INT8 weights instead of the unrounded ones.
        rotate: `hadamard` rotates queries and keys first (`ops/rotate`); `none` does not.
        rotate_v: `hadamard` rotates values, and the output back; `none` does not.
        equalize: before rotation, keys are multiplied by one constant per channel, the state's `k.equalizer`, and
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
    """Sparse V: a decode skips values with weights below `tau`, up to a dropped mass of `budget` per row.

    The output moves by at most `budget * max|V|`. `tau = 0` turns it off; an infinite `budget` is the paper's setting.
    Row sums keep all weights.

    The reference compares every weight with the final row sum. A kernel judges whole blocks while it reads them, and
    never the ring or sinks. It skips a block if two conditions hold for all queries of the program. The row sum there
    covers the program's part so far and the context's first block (or the sinks).

    - The block's largest weight is below `tau` of that row sum.
    - The part's dropped mass stays within the budget of the part's row sum plus a share of the first block's sum.

    Sums only grow, so no weight above `tau` is skipped and the mass stays within the budget. A kernel skips less than
    the threshold allows."""

    tau: float = 0.0
    budget: float = 1e-4


@dataclass(frozen=True)
class LayerSpec:
    """Choices of one layer: formats of K and V, window, compute, sparsity, sink pool, and `impl`.

    `impl`: `reference` or `triton`. `latent`: multi-head latent attention with one KV head, whose V is the latent and
    whose K is the RoPE part. Attention keys are both concatenated, latent first, and products are in floating point."""

    k: Format
    v: Format
    window: Window = field(default_factory=Window)
    compute: Compute = field(default_factory=Compute)
    sparsity: Sparsity = field(default_factory=Sparsity)
    sink_pool: SinkPool = field(default_factory=SinkPool)
    impl: str = "reference"
    latent: bool = False

    def encode(self) -> str:
        """Return the spec as one line of JSON, the inverse of `decode_spec`. Operators take text instead of objects."""

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
    """Return the layer that `LayerSpec.encode` wrote as `text`."""
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
