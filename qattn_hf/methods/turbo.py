"""FlashQ storage, INT8 attention, and the SAS softmax as an option (paper: TurboAttention, Kang et al.)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from qattn_hf.layer.memory_budget import BudgetLayerSpec, at_stage
from qattn_hf.messages import named, parse_size, shown
from qattn_hf.methods.base import CLIP, SMOOTH_K, Measured, Moved, WindowedMethod, for_papers
from qattn_kernels.formats import Format
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.formats.flashq_token.reference import FlashQTokenFormat
from qattn_kernels.formats.smoothed.reference import SmoothedFormat
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.layout import SinkPool, Window

Bits = Literal[4, 2, "mixed"]
HeadLists = list[list[int]]
FEWEST_BYTES = 2**14  # a block and the recent tokens of one head take more


class Turbo(WindowedMethod):
    """TurboAttention: 4- or 2-bit blocks, an INT8 buffer of recent tokens, INT8 attention, optional mixed bits.

    SinkQ's pool of attention sinks is added to the paper's method, because a model with sinks loses three times as much
    without the pool. `sink_num=0` is the paper's method.
    """

    variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": "mixed", "clip": 0.75},
        {"k_bits": 4, "v_bits": 2, "softmax": "sas", "sink_num": 3, "rotate_k": "hadamard", "rotate_v": "hadamard"},
        {"block_kv": 32, "buffer_size": 64, "smooth_k": True},
        {"compute": "model", "sparse_v_tau": 1e-3, "v_scale": "token"},
        {"memory": "1GiB", "bits": 2, "rotate_k": "hadamard", "clip": 0.5},
    )
    measured = (
        Measured("turbo", "quality compare bits decode prefill tune released", record="turbo_sink"),
        Measured("turbo:bits=mixed", "quality compare bits released", record="turbo_sink"),
        Measured("turbo:bits=2", "quality compare bits released", record="turbo_2"),
        Measured("turbo:sink_num=0", "quality compare bits decode prefill released"),
        Measured("turbo:bits=mixed,sink_num=0", "quality compare bits trees-decode released"),
        Measured("turbo:bits=2,sink_num=0", "quality compare bits trees-decode released"),
        Measured("turbo:softmax=sas,sink_num=0", "quality trees-decode trees-prefill"),
        Measured("turbo:rotate_k=hadamard,v_scale=token,sink_num=0", "quality", record="turbo_rotated"),
        *(
            Measured(f"turbo:{pieces}", "quality", record="turbo_pieces")
            for pieces in (
                "rotate_k=hadamard,sink_num=0",
                "rotate_k=hadamard,v_scale=token",
                "v_bits=2",
                "v_bits=2,rotate_k=hadamard,v_scale=token,sink_num=0",
                "v_bits=2,rotate_k=hadamard",
                "bits=2,rotate_k=hadamard,v_scale=token,sink_num=0",
                "bits=2,rotate_k=hadamard",
                "bits=2,rotate_k=hadamard,v_scale=token",
            )
        ),
        Measured("turbo_rotated", "compare bits decode prefill tune released"),
        Measured("turbo_sink_k4v2", "compare tune released"),
    )

    moved: ClassVar[dict[str, Moved]] = {
        **WindowedMethod.moved,
        "priority": Moved("priority", ("entropy", "random"), for_papers("paper_turbo")),
        "scope": Moved("separate", ("joint",), "k_low_heads and v_low_heads, which name heads ranked in any way"),
        "buffer_scale": Moved("token", ("universal",), for_papers("paper_turbo")),
        "p_scale": Moved("row", ("tile",), for_papers("paper_turbo")),
    }

    bits: Bits = Field(4, description="bits of K and V: 4, 2, or mixed, which gives the least sensitive heads 2")
    k_bits: Bits | None = Field(None, description="bits of K, if they differ from bits")
    v_bits: Bits | None = Field(None, description="bits of V, if they differ from bits")
    clip: float = Field(0.0, ge=0, le=1, multiple_of=1 / 16, description=CLIP)
    n_h: int | None = Field(None, ge=0, description="mixed: number of 2-bit heads of a layer; null means half")
    priority: Literal["priority", "min_max", "variation"] = Field(
        "priority", description="mixed: measure that ranks heads when a row's first block closes; the lowest get 2 bits"
    )
    k_low_heads: HeadLists | None = Field(
        None, description="mixed: the 2-bit K heads of each layer, the same for all rows"
    )
    v_low_heads: HeadLists | None = Field(None, description="mixed: the 2-bit V heads of each layer")
    block_kv: Literal[32, 64, 128] = Field(64, description="tokens of a packed block; 32: reference only")
    block_q: Literal[32, 64, 128] = Field(64, description="queries of a prefill that share a scale")
    buffer_size: int = Field(64, gt=0, le=1024, description="tokens of the INT8 buffer, a multiple of block_kv")
    v_scale: Literal["block", "token"] = Field(
        "block",
        description="what shares an INT8 scale of V: a packed block, as in the paper, or a token, which preserves the "
        "small values of attention sinks",
    )
    smooth_k: bool = Field(False, description=SMOOTH_K)
    sink_num: int = Field(
        3, ge=0, le=8, description="attention sinks per head that are not packed; 0 means none, as in the paper"
    )
    sink_window: int = Field(8, ge=0, le=128, description="sinks that left the pool last and stay unpacked too")
    memory: int | str | None = Field(
        None,
        description="limit for all packed layers together, in bytes or as text such as 12GiB. Blocks begin with 8 "
        "bits, and when room runs out the oldest get fewer, down to `bits`",
    )

    @model_validator(mode="after")
    def _fits(self) -> Turbo:
        if self.buffer_size % self.block_kv:
            raise ValueError(f"buffer_size={self.buffer_size} must be a multiple of block_kv={self.block_kv}")
        lists = (self.k_low_heads, self.v_low_heads)
        if self.n_h is not None and any(heads is not None for heads in lists):
            raise ValueError("n_h clashes with k_low_heads, v_low_heads: the lists say how many heads get 2 bits")
        for side, low_heads in zip("kv", lists, strict=True):
            if low_heads is not None and self._side_bits(side) != "mixed":
                raise ValueError(f"{side}_low_heads needs {side}_bits='mixed', which is {self._side_bits(side)!r}")
        if self.n_h is not None and "mixed" not in (self._side_bits("k"), self._side_bits("v")):
            raise ValueError("n_h needs bits='mixed'")
        return self

    @model_validator(mode="after")
    def _budget_fits(self) -> Turbo:
        if self.memory is None:
            return self
        if (n_bytes := parse_size(self.memory)) < FEWEST_BYTES:
            meant = f"{self.memory}GiB" if isinstance(self.memory, int) and self.memory else "12GiB"
            raise ValueError(
                f"memory={named(self.memory)} is {n_bytes} bytes, too few for a cache: a number without a unit counts "
                f"bytes. Write the unit, memory: {meant}"
            )
        if "mixed" in (self._side_bits("k"), self._side_bits("v")):
            raise ValueError("memory clashes with bits='mixed', where heads have different bits: take bits=4 or bits=2")
        if self.sliding == "packed" or self.sparse_v_tau:
            raise ValueError("memory clashes with sparse_v_tau and with packed windows (sliding): leave them out")
        return self

    def layer_spec(self, layer: int, layers: int, heads: int) -> LayerSpec:
        spec = super().layer_spec(layer, layers, heads)
        if self.memory is None:
            return spec
        k_bits, v_bits = (bits for side in "kv" if (bits := self._side_bits(side)) != "mixed")
        return at_stage(BudgetLayerSpec(**vars(spec), memory=parse_size(self.memory), k_bits=k_bits, v_bits=v_bits), 0)

    def sink_pool(self, layer: int) -> SinkPool:
        return SinkPool() if self._pool_clash() else super().sink_pool(layer)

    def without_default_pool(self, spec: LayerSpec) -> LayerSpec:
        return spec if self._asks_for_pool() else dataclasses.replace(spec, sink_pool=SinkPool())

    def why_no_pool(self, spec: LayerSpec) -> str | None:
        if spec.sink_pool.num or self.sink_num == 0 or self._asks_for_pool():
            return None
        if spec.latent:
            return "latent attention (MLA) stores parts of keys"
        window = "a sliding window drops its sinks" if hasattr(spec, "sliding_window") else None
        return self._pool_clash() or window  # None: sink_skip_layers skips this layer

    def _asks_for_pool(self) -> bool:
        """Return whether the user set `sink_num`. A recipe with every setting, such as turbo.yaml, does not count."""
        return "sink_num" in self.model_fields_set and self.model_fields_set != set(type(self).model_fields)

    def _pool_clash(self) -> str | None:
        """Return the setting with which kernels support no pool, if only the defaults ask for a pool; else None."""
        if self._asks_for_pool():
            return None
        if self.smooth_k:
            return "kernels know none with smooth_k"
        return "kernels know none with a buffer of several blocks" if self.buffer_size > self.block_kv else None

    def _side_bits(self, side: str) -> Bits:
        own = self.k_bits if side == "k" else self.v_bits
        return self.bits if own is None else own

    def _low(self, side: str, layer: int, layers: int, heads: int) -> tuple[int, tuple[int, ...] | None]:
        """Return the number of 2-bit heads of a side in a layer of `mixed`, and their list if a recipe gives it."""
        lists = self.k_low_heads if side == "k" else self.v_low_heads
        if self._side_bits(side) != "mixed":
            return 0, None
        if lists is None:
            low = heads // 2 if self.n_h is None else self.n_h
            if low > heads:
                raise ValueError(f"n_h = {low}: the model has {heads} KV heads")
            return low, None
        if len(lists) != layers:
            raise ValueError(f"{side}_low_heads has {len(lists)} layers, the model has {layers}")
        chosen = tuple(sorted(set(lists[layer])))
        if len(chosen) != len(lists[layer]) or any(not 0 <= head < heads for head in chosen):
            heads_text = shown(lists[layer])
            raise ValueError(f"{side}_low_heads, layer {layer} = {heads_text}: heads are 0 to {heads - 1}, each once")
        return len(chosen), chosen

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        formats = []
        for side in "kv":
            n_low, low_heads = self._low(side, layer, layers, heads)
            by_token = side == "v" and self.v_scale == "token"
            formats.append(
                (FlashQTokenFormat if by_token else FlashQFormat)(
                    bits=self._side_bits(side),
                    n_low=n_low,
                    priority=self.priority,
                    low_heads=low_heads,
                    clip=self.clip,
                    transposed=side == "v",
                )
            )
        return SmoothedFormat(inner=formats[0]) if self.smooth_k else formats[0], formats[1]

    def window(self) -> Window:
        return Window(block=self.block_kv, span=self.buffer_size, horizon=self.crop_horizon)

    def arithmetic(self) -> Compute:
        return dataclasses.replace(super().arithmetic(), block_q=self.block_q)


METHOD = Turbo
