"""Base classes of methods: settings that every method has, and the conversion from settings to a layer's spec."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qattn_kernels.formats import Format
from qattn_kernels.layer.spec import Compute, LayerSpec, Sparsity
from qattn_kernels.layout import SinkPool, Window

Arithmetic = Literal["int8", "model"]
Rotation = Literal["none", "hadamard"]
Scales = Literal["token", "checkpoint"]
PARTS = ("k", "v", "prefill", "decode")  # `k_bits` sets for K alone what `bits` sets for both sides
SMOOTH_K = "subtract a row's mean key before keys are quantized (SageAttention2)"
SCALES = (
    "token: every token has a scale. checkpoint: one scale for keys and one for values of a layer, from the model's "
    "checkpoint (compressed-tensors, ModelOpt, Quark); reference only"
)
CLIP = (
    "shrinks the 2-bit range: the outermost levels move inward by clip / 2 of a step, a multiple of 1/16. Steps become "
    "finer, and outliers err more"
)
PURPOSES = ("quality", "compare", "bits", "tune", "decode", "prefill", "trees-decode", "trees-prefill", "released")


class Measured(NamedTuple):
    """A setting of a method that is worth measuring, for `qattn tune` and the lists of settings in `eval/`.

    Attributes:
        setting: as commands spell it, `turbo:bits=2`, or a recipe of the package that uses the method.
        purposes: some of `PURPOSES`, separated by spaces. `quality`: KL and tasks of the trained models. `compare`:
            `qattn compare`. `bits`: the size of a cached value. `tune`: options of `qattn tune`. `decode`, `prefill`:
            speed. `trees-...`: speed, only where `eval/compare_trees.py` compares two checkouts. `released`: quality on
            released checkpoints (`eval/released.py`).
        record: name of the record with its quality and tasks. Empty: the setting's text up to the colon.
    """

    setting: str
    purposes: str
    record: str = ""


class Moved(NamedTuple):
    """Values of a setting that moved out of the package.

    Attributes:
        default: the value that the method uses. Recipes may still give it.
        values: the values that moved.
        instead: replacement for these values, as the message has it after "Fix: take".
    """

    default: Any
    values: tuple[Any, ...]
    instead: str


WINDOWS = Moved("exact", ("auto",), "'packed', which quantizes, or 'exact', which does not")
OLD_EXACT = ("lossless", "model", "unquantized")  # old names of sliding='exact'


def for_papers(module: str) -> str:
    """Name the method that `eval/papers/MODULE.py` registers, for messages."""
    return f"the method {module}, which eval/papers/{module}.py registers (`python eval/paper.py list`)"


class Method(BaseModel):
    """Base of all methods. A subclass adds its settings as fields and defines `formats`.

    Field names are the keys of a YAML recipe and the keywords of `patch`. Types are strict, and unknown keys are
    refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # settings that the conformance suite checks in addition to the defaults
    variants: ClassVar[tuple[dict[str, Any], ...]] = ()
    # settings worth measuring; a subclass of another method lists its separate settings
    measured: ClassVar[tuple[Measured, ...]] = ()
    # values that only comparisons with papers need, by the setting's name
    moved: ClassVar[dict[str, Moved]] = {}

    compute: Arithmetic | None = Field(
        None,
        description="sets the next two at once; int8 in a method that defaults to model: reference only",
    )
    prefill_compute: Arithmetic | None = Field(
        None,
        description="calls of more than 32 tokens: int8 multiplies codes; model dequantizes, and multiplies in the "
        "model's dtype",
    )
    decode_compute: Arithmetic | None = Field(
        None, description="the same choice for calls of at most 32 tokens, such as decode steps"
    )
    softmax: Literal["exact", "sas"] = Field(
        "exact",
        description="exact exponential, or SAS, TurboAttention's approximation; SAS has no measured speed-up",
    )
    sas_threshold: float = Field(-6.0, lt=0, description="SAS uses 0 for exp(x) if x is below this")
    sparse_v_tau: float = Field(
        0.0, ge=0, lt=1, description="sparse V: decode skips values whose attention weight is below this; 0 is off"
    )
    sparse_v_budget: float = Field(
        1e-4, gt=0, description="sparse V: largest share of a query's weights that may be skipped; .inf as in the paper"
    )
    crop_horizon: int = Field(64, ge=32, le=4096, description="newest tokens that crop removes bit for bit")
    decode: Literal["auto", "graph", "fused", "compile", "eager"] = Field(
        "auto",
        description="how generate runs decode steps; auto is graph (CUDA graph) on a GPU where the model allows it, "
        "then fused in long answers",
    )
    sliding: Literal["exact", "packed"] = Field(
        "exact", description="layers with a sliding window: exact keeps the model's precision, packed quantizes"
    )
    impl: Literal["auto", "reference", "triton"] = Field(
        "auto",
        description="Triton kernels or the PyTorch reference; auto is triton on a GPU where kernels know the settings",
    )

    @classmethod
    def name(cls) -> str:
        """Return the name of the method: the name of its file."""
        return cls.__module__.rsplit(".", 1)[-1]

    @classmethod
    def covered(cls, key: str, value: Any) -> set[str]:
        """Return settings of one side or phase that this one also sets, unless null: `k_bits`, `v_bits` for `bits`."""
        return set() if value is None else {f"{part}_{key}" for part in PARTS} & cls.model_fields.keys()

    @classmethod
    def not_overridden(cls, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of `below` that `above` neither sets nor covers."""
        overridden = set(above).union(*(cls.covered(key, value) for key, value in above.items()))
        return {key: value for key, value in below.items() if key not in overridden}

    @classmethod
    def default_compute(cls) -> Arithmetic:
        """Return the arithmetic of prefill and decode without `compute`: `int8` or `model`."""
        return "int8"

    @model_validator(mode="before")
    @classmethod
    def _without_moved(cls, given: Any) -> Any:
        """Refuse values that moved, and drop keys that are not settings any more."""
        for key, moved in {"sliding": WINDOWS, **cls.moved}.items():
            if key in given and given[key] in moved.values:
                raise ValueError(f"{key}={given[key]!r} is not a setting of {cls.name()}. Fix: take {moved.instead}")
        gone = {key: moved.default for key, moved in cls.moved.items() if key not in cls.model_fields}
        return {key: value for key, value in given.items() if key not in gone or value != gone[key]}

    @model_validator(mode="before")
    @classmethod
    def _with_new_names(cls, given: Any) -> Any:
        """Replace old names of values, with a warning that has the new name."""
        if (old := given.get("sliding")) not in OLD_EXACT:
            return given
        warnings.warn(f"sliding={old!r} is an old name. Fix: use sliding='exact'", FutureWarning, stacklevel=2)
        return {**given, "sliding": "exact"}

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
        """Return whether keys and values are packed. Otherwise they stay in Transformers' stock caches."""
        return True

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        """Return the formats of keys and of values of one layer.

        Args:
            layer: index of the layer, of `layers` in total.
            heads: KV heads of the model.

        Raises:
            ValueError: a setting does not fit the number of layers or heads.
        """
        raise NotImplementedError

    def window(self) -> Window:
        """Return block size, ring of open (recent, not yet packed) tokens and residual window."""
        return Window(horizon=self.crop_horizon)

    def sink_pool(self, layer: int) -> SinkPool:
        """Return the pool of attention sinks of a layer. It is empty unless the method has one."""
        return SinkPool()

    def without_default_pool(self, spec: LayerSpec) -> LayerSpec:
        """Return the spec of a layer that cannot have a pool of sinks, without the pool of the defaults."""
        return spec

    def why_no_pool(self, spec: LayerSpec) -> str | None:
        """Return why a layer of this spec lacks the pool that the defaults ask for, or None if it has the pool."""
        return None

    def arithmetic(self) -> Compute:
        """Return the arithmetic of prefill and decode: products, softmax, scales, smoothing, rotation."""
        both = self.compute or self.default_compute()
        return Compute(
            prefill=self.prefill_compute or both,
            decode=self.decode_compute or both,
            softmax=self.softmax,
            sas_threshold=self.sas_threshold,
        )

    def layer_spec(self, layer: int, layers: int, heads: int) -> LayerSpec:
        """Return the spec of one layer. `impl` is `reference` until `chosen_impl` decides.

        Args:
            layer: index of the layer, of `layers` in total.
            heads: KV heads of the model.

        Raises:
            ValueError: a setting does not fit the number of layers or heads.
        """
        k, v = self.formats(layer, layers, heads)
        sparsity = Sparsity(self.sparse_v_tau, self.sparse_v_budget)
        return LayerSpec(k, v, self.window(), self.arithmetic(), sparsity, self.sink_pool(layer))

    def last_layer_spec(self, heads: int) -> LayerSpec:
        """Return the spec of the last layer of a model with `heads` KV heads, for benches and tests without a model.

        It is the last layer because some settings skip the first layers.
        """
        lists = [getattr(self, f"{side}_low_heads", None) for side in "kv"]
        layers = max(len(heads_of_layers or ()) for heads_of_layers in lists) or 8
        return self.layer_spec(layers - 1, layers, heads)

    def chosen_impl(self, device_type: str, reason: str | None) -> str:
        """Return `triton` or `reference`, for one layer.

        Args:
            device_type: `cuda` or `cpu`.
            reason: why no kernel can compute the layer. None: kernels can.

        Raises:
            ValueError: `impl` is `triton` and `reason` is given.
        """
        if self.impl == "triton" and reason is not None:
            raise ValueError(f"impl = 'triton': {reason}; use impl='auto' or 'reference'")
        wanted = self.impl == "triton" or (self.impl == "auto" and device_type == "cuda")
        return "triton" if wanted and reason is None else "reference"


class EqualizedMethod(Method):
    """Base of methods that can rotate keys, and multiply each channel by a constant before the rotation."""

    equalize_k: bool = Field(
        False,
        description="before the rotation, divide each key channel by a power of its key-to-query size ratio and "
        "multiply the query channel by it. Products stay the same, and no large key channel spreads over all others. "
        "patch runs the model once to find the powers",
    )

    @model_validator(mode="after")
    def _equalizes_what_is_rotated(self) -> EqualizedMethod:
        if self.equalize_k and self.arithmetic().rotate == "none":
            if "k_format" in type(self).model_fields:
                needed = "rotate='hadamard' and a turbo format for k_format"
            else:
                needed = "rotate_k='hadamard'" if "rotate_k" in type(self).model_fields else "rotate='hadamard'"
            raise ValueError(f"equalize_k needs rotated keys: set {needed}, or leave equalize_k out")
        return self

    def arithmetic(self) -> Compute:
        return dataclasses.replace(super().arithmetic(), equalize=self.equalize_k)


class RotatedMethod(EqualizedMethod):
    """Base of methods that can rotate keys and values before quantization.

    A block Hadamard with random signs (`ops.rotate`) spreads outliers of one channel over all channels that are rotated
    together. Queries are rotated like keys, and the output is rotated back. QuaRot and SAW-INT4 rotate keys in this
    way, after RoPE.
    """

    rotate_k: Rotation = Field("none", description="rotation of keys and queries before keys are quantized")
    rotate_v: Rotation = Field("none", description="rotation of values before quantization; outputs are rotated back")

    def arithmetic(self) -> Compute:
        return dataclasses.replace(super().arithmetic(), rotate=self.rotate_k, rotate_v=self.rotate_v)


class WindowedMethod(RotatedMethod):
    """Base of methods with a ring of open tokens. A closing block can leave out attention sinks."""

    moved: ClassVar[dict[str, Moved]] = {
        "sink_select": Moved("smallest_key", ("largest_key", "attention", "random"), for_papers("paper_sinkq")),
        "sink_exclude": Moved(True, (False,), for_papers("paper_sinkq")),
        "sink_prefill": Moved("group", ("whole",), for_papers("paper_sinkq")),
    }

    sink_num: int = Field(0, ge=0, le=8, description="attention sinks per head that are not packed; 0 means none")
    sink_window: int = Field(0, ge=0, le=128, description="sinks that left the pool last and stay unpacked too")
    sink_skip_layers: int = Field(0, ge=0, description="first layers without attention sinks")

    def sink_pool(self, layer: int) -> SinkPool:
        if self.sink_num == 0 or layer < self.sink_skip_layers:
            return SinkPool()
        return SinkPool(self.sink_num, self.sink_window)
