"""INT8 a token, the safe default to try first."""

from __future__ import annotations

from qattn_hf.methods.base import Method
from qattn_kernels.stores import Store
from qattn_kernels.stores.int8 import Int8Store


class Int8(Method):
    """INT8 keys and values with one scale a token: near lossless, half the memory of bf16, append only."""

    def stores(self, layer: int, layers: int, heads: int) -> tuple[Store, Store]:
        return Int8Store(), Int8Store(transposed=True)


METHOD = Int8
