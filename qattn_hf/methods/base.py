"""What every method offers: the settings that act on any format, and the step from settings to a layer's spec."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qattn_kernels.formats import Format
from qattn_kernels.layer.spec import Compute, LayerSpec, Sparsity
from qattn_kernels.layout import SinkPool, Window

Arithmetic = Literal["int8", "model"]


Select = Literal["smallest_key", "largest_key", "attention", "random"]
PARTS = ("k", "v", "prefill", "decode")  # `k_bits` is for K alone what `bits` is for both sides
SMOOTH_K = "keys are coded around a row's mean key (SageAttention2)"
PURPOSES = ("quality", "compare", "bits", "tune", "decode", "prefill", "beside-decode", "beside-prefill")


class Measured(NamedTuple):
    """A setting of a method that is worth measuring: `qattn tune` and the lists of settings in `eval/` are of these.

    Attributes:
        setting: as commands spell it, `turbo:bits=2`, or a recipe of the package that takes the method.
        purposes: some of `PURPOSES`, a space between them. `quality`: KL and tasks of the trained models; `compare`:
            `qattn compare`; `bits`: the size of a cached value; `tune`: what `qattn tune` may give a layer; `decode`,
            `prefill`: speed; `beside-...`: speed, only where `eval/beside.py` compares two checkouts.
        record: name of the record of quality and of tasks that holds it; if empty, the setting's up to the colon.
    """

    setting: str
    purposes: str
    record: str = ""


class Method(BaseModel):
    """Base of all methods; a subclass adds its settings and names its formats.

    Fields are the keys of a YAML recipe and the keywords of `patch`. Types are strict, unknown keys are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # what the conformance suite checks beside the defaults
    variants: ClassVar[tuple[dict[str, Any], ...]] = ()
    # settings worth measuring; a subclass of another method gives its own
    measured: ClassVar[tuple[Measured, ...]] = ()

    compute: Arithmetic | None = Field(
        None,
        description="arithmetic of prefill and decode; sets both; int8 where a method has model: reference only",
    )
    prefill_compute: Arithmetic | None = Field(
        None, description="INT8 products, or floating point over the dequantized format"
    )
    decode_compute: Arithmetic | None = Field(None, description="the same for calls of at most 32 tokens")
    softmax: Literal["exact", "sas"] = Field(
        "exact", description="exponential, or TurboAttention's approximation, of which no gain in speed is recorded"
    )
    sas_threshold: float = Field(-6.0, lt=0, description="SAS gives 0 below this")
    sparse_v_tau: float = Field(0.0, ge=0, lt=1, description="decode skips values whose weight is below; 0 is off")
    sparse_v_budget: float = Field(
        1e-4, gt=0, description="a row drops at most this share of its weights; .inf is the paper"
    )
    crop_horizon: int = Field(64, ge=32, le=4096, description="tokens that crop takes back bit for bit")
    decode: Literal["auto", "graph", "compile", "eager"] = Field(
        "auto", description="how generate runs its decode steps; auto is graph on a GPU where it can be"
    )
    impl: Literal["auto", "reference", "triton"] = Field(
        "auto", description="who computes; auto takes Triton where it can, else the reference"
    )

    @classmethod
    def name(cls) -> str:
        """Name of the method: its file's."""
        return cls.__module__.rsplit(".", 1)[-1]

    @classmethod
    def covered(cls, key: str, value: Any) -> set[str]:
        """Settings of one part that this one sets for all: of `bits` they are `k_bits` and `v_bits`. None sets none."""
        return set() if value is None else {f"{part}_{key}" for part in PARTS} & cls.model_fields.keys()

    @classmethod
    def left_of(cls, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        """Those of the settings `below` that hold with `above` on top: what `above` neither sets nor covers."""
        gone = set(above).union(*(cls.covered(key, value) for key, value in above.items()))
        return {key: value for key, value in below.items() if key not in gone}

    @classmethod
    def default_compute(cls) -> Arithmetic:
        """Arithmetic where no setting says otherwise."""
        return "int8"

    @model_validator(mode="after")
    def _one_compute(self) -> Method:
        for key in ("prefill_compute", "decode_compute"):
            own = getattr(self, key)
            if self.compute is not None and own is not None and own != self.compute:
                raise ValueError(
                    f"compute={self.compute!r} sets both, but {key}={own!r}: give compute, or the two apart"
                )
        return self

    def packs(self) -> bool:
        """Whether keys and values are packed; else transformers' own caches hold them and only attention is ours."""
        return True

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        """The formats of K and of V of one layer with `heads` KV heads; ValueError if a setting does not fit."""
        raise NotImplementedError

    def window(self) -> Window:
        """What surrounds the packed blocks."""
        return Window(horizon=self.crop_horizon)

    def sink_pool(self, layer: int) -> SinkPool:
        """The pool of sinks beside the window of a layer; none unless the method has one."""
        return SinkPool()

    def arithmetic(self) -> Compute:
        """How attention computes."""
        both = self.compute or self.default_compute()
        return Compute(
            prefill=self.prefill_compute or both,
            decode=self.decode_compute or both,
            softmax=self.softmax,
            sas_threshold=self.sas_threshold,
        )

    def layer_spec(self, layer: int, layers: int, heads: int) -> LayerSpec:
        """The four choices of one layer, computed by the reference until somebody chooses (`chosen_impl`)."""
        k, v = self.formats(layer, layers, heads)
        sparsity = Sparsity(self.sparse_v_tau, self.sparse_v_budget)
        return LayerSpec(k, v, self.window(), self.arithmetic(), sparsity, self.sink_pool(layer))

    def last_layer_spec(self, heads: int) -> LayerSpec:
        """`layer_spec` of a last layer, which no setting spares, where there is no model to ask."""
        lists = [getattr(self, f"{side}_low_heads", None) for side in "kv"]
        layers = max(len(found) if found is not None else 0 for found in lists) or 8
        return self.layer_spec(layers - 1, layers, heads)

    def chosen_impl(self, device_type: str, reason: str | None) -> str:
        """Who computes a layer, given why Triton cannot (None: it can); ValueError if `impl` asks for what is not."""
        if self.impl == "triton" and reason is not None:
            raise ValueError(f"impl = 'triton': {reason}; use impl='auto' or 'reference'")
        wanted = self.impl == "triton" or (self.impl == "auto" and device_type == "cuda")
        return "triton" if wanted and reason is None else "reference"


class WindowedMethod(Method):
    """Base of methods whose tokens stand open before their block closes: there sinks can be kept out of it."""

    sink_num: int = Field(0, ge=0, le=8, description="sinks a head keeps out of its packed blocks; 0 is none")
    sink_window: int = Field(0, ge=0, le=128, description="evicted sinks that stay out of them too")
    sink_skip_layers: int = Field(0, ge=0, description="first layers that have no pool")
    sink_select: Select = Field(
        "smallest_key", description="which tokens are sinks; others, to compare: reference only"
    )
    sink_exclude: bool = Field(True, description="sinks leave the statistics of their block too; false: reference only")
    sink_prefill: Literal["group", "whole"] = Field(
        "group",
        description="the pool competes with each block, or (whole: reference only) with the first call at once as in "
        "the paper",
    )

    def sink_pool(self, layer: int) -> SinkPool:
        if self.sink_num == 0 or layer < self.sink_skip_layers:
            return SinkPool()
        return SinkPool(self.sink_num, self.sink_window, self.sink_select, self.sink_exclude, self.sink_prefill)
