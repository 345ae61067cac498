"""What a layer stores and how it computes: frozen, hashable, and written as text so that an operator can carry it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from qattn_kernels.layout import SinkPool, Window
from qattn_kernels.stores import Store, get_store
from qattn_kernels.stores.base import INT8_LEVELS

SHORT_CALL = 32  # calls of at most this many tokens append first and read the cache as single steps would


@dataclass(frozen=True)
class Compute:
    """Arithmetic of the attention over what is stored.

    Attributes:
        prefill, decode: `int8` (products of 8-bit integers) or `model` (floating point over the undone store).
        pv: the product with values where the one with keys is `int8`: that too, or `model`.
        softmax: `exact` or `sas` (algorithm SAS of TurboAttention, cut at `sas_threshold`).
        p_scale: INT8 weights of a prefill are scaled by `row` of a block or by `tile` (the paper's).
        block_q: queries of a prefill that share one INT8 scale; 1: each token has its own.
        qk_levels, pv_levels: largest INT8 code of queries and of weights, and of keys and values that have no codes.
        round_sum: row sums are of the rounded INT8 weights, not of what they were rounded from.
        rotate: `hadamard` turns queries and keys before anything else (`rotate/`), `none` does not.
        rotate_v: the same for values, and the output is turned back.
    """

    prefill: str = "int8"
    decode: str = "int8"
    softmax: str = "exact"
    sas_threshold: float = -6.0
    p_scale: str = "row"
    block_q: int = 64
    pv: str = "int8"
    qk_levels: int = INT8_LEVELS
    pv_levels: int = INT8_LEVELS
    round_sum: bool = False
    rotate: str = "none"
    rotate_v: str = "none"


@dataclass(frozen=True)
class Sparsity:
    """Sparse V: skip values whose weight is below `tau`, up to a dropped mass of `budget` a row. `tau = 0` is off."""

    tau: float = 0.0
    budget: float = 1e-4


@dataclass(frozen=True)
class LayerSpec:
    """The four choices of one layer: store of K and of V, window with its sink pool, compute, sparsity; and who
    computes it."""

    k: Store
    v: Store
    window: Window = field(default_factory=Window)
    compute: Compute = field(default_factory=Compute)
    sparsity: Sparsity = field(default_factory=Sparsity)
    sink_pool: SinkPool = field(default_factory=SinkPool)
    impl: str = "reference"

    def encode(self) -> str:
        """One line of JSON that `decode_spec` reads back: operators take text where they cannot take objects."""

        def plain(part: Any) -> dict[str, Any]:
            return (
                {"name": part.name, **dataclasses.asdict(part)} if isinstance(part, Store) else dataclasses.asdict(part)
            )

        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({k: v if isinstance(v, str) else plain(v) for k, v in parts.items()}, sort_keys=True)


def _store(settings: dict[str, Any]) -> Store:
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return get_store(settings.pop("name"))(**settings)


@lru_cache(maxsize=1024)
def decode_spec(text: str) -> LayerSpec:
    """The inverse of `LayerSpec.encode`."""
    parts = json.loads(text)
    return LayerSpec(
        k=_store(parts["k"]),
        v=_store(parts["v"]),
        window=Window(**parts["window"]),
        compute=Compute(**parts["compute"]),
        sparsity=Sparsity(**parts["sparsity"]),
        sink_pool=SinkPool(**parts["sink_pool"]),
        impl=parts["impl"],
    )
