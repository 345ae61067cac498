"""Which layers of a model are packed, and which keep a cache layer of transformers, from its text config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from qattn_hf.errors import UnsupportedError
from qattn_hf.model import _compat
from qattn_kernels.layer.spec import LayerSpec

WINDOWED = {"sliding_attention": "sliding window", "chunked_attention": "attention in chunks"}
STATES = {"linear_attention": "linear attention or SSM", "conv": "convolution"}
REFUSED = {
    "indexed_attention": "attention over tokens that an indexer chooses (DSA)",
    "deepseek_sparse_attention": "attention over tokens that an indexer chooses (DSA)",
    "qwen_sparse_attention": "attention over tokens that an indexer chooses",
    "minimax_m3_sparse": "attention over blocks that an indexer chooses",
    "hybrid_sliding": "sliding windows beside linear attention or an SSM",
    "reference_sliding_attention": "sliding windows that keep a reference",
    "compressed_sparse_attention": "attention over compressed tokens",
    "heavily_compressed_attention": "attention over compressed tokens",
}


@dataclass(frozen=True)
class HybridLayerSpec(LayerSpec):
    """Spec of a packed layer that has linear attention or an SSM beside its attention, with states of the model's own.

    Attributes:
        states: number of convolution and recurrent states.
    """

    states: int = 1

    def __str__(self) -> str:
        return f"{STATES['linear_attention']} beside attention"

    @property
    def rolls_back(self) -> bool:
        """Whether `crop` can undo the tokens of drafts: it cannot."""
        return False


@dataclass(frozen=True)
class WindowLayerSpec(LayerSpec):
    """Spec of a packed layer with a sliding window, or with attention in chunks.

    Attributes:
        sliding_window: tokens that a query sees, itself included; at most, where they are those of its chunk.
        chunked: a chunk begins at a multiple of `sliding_window` positions.
        unquantized: keys and values have the model's precision, whatever the recipe's method.
    """

    sliding_window: int = 1
    chunked: bool = False
    unquantized: bool = False

    def __str__(self) -> str:
        return f"{WINDOWED[kind_of(self)]} of {self.sliding_window}, {'unquantized' if self.unquantized else 'packed'}"

    @property
    def local(self) -> int:
        """The window as `Scores` has it."""
        return -self.sliding_window if self.chunked else self.sliding_window


@dataclass(frozen=True)
class ModelLayerSpec:
    """What a layer that is not packed keeps, in place of a `LayerSpec`.

    Attributes:
        kind: layer type of transformers: `sliding_attention`, `chunked_attention`, `linear_attention`, `conv`, `dummy`.
        window: tokens of the sliding window, or of a chunk; None where there is none.
        states: number of convolution and recurrent states.
        why: reason for which a layer with a window is not packed (`recipes/sliding.py`); None for other kinds.
        reads: of a `dummy`, the earlier layer whose keys and values it attends to; None where it has no attention.
    """

    kind: str
    window: int | None = None
    states: int = 1
    why: str | None = None
    reads: int | None = None

    def __str__(self) -> str:
        if self.kind == "dummy":
            return "no attention" if self.reads is None else f"keys and values of layer {self.reads}"
        return f"{WINDOWED[self.kind]} of {self.window}" if self.kind in WINDOWED else STATES[self.kind]

    @property
    def rolls_back(self) -> bool:
        """Whether `crop` can undo the tokens of drafts, once past states are recorded."""
        return self.kind != "linear_attention"


def window_of(spec: LayerSpec) -> int | None:
    """Tokens of the sliding window of a packed layer; None where it has none."""
    return spec.sliding_window if isinstance(spec, WindowLayerSpec) else None


def of_method(spec: LayerSpec | ModelLayerSpec) -> bool:
    """Whether the recipe's method has a layer of this spec: it is packed, and no unquantized window."""
    return isinstance(spec, LayerSpec) and not (isinstance(spec, WindowLayerSpec) and spec.unquantized)


def own_states(specs: Iterable[LayerSpec | ModelLayerSpec | None]) -> list[ModelLayerSpec | HybridLayerSpec]:
    """Specs of the layers that keep something of the model's own: what is not packed, or stands beside it."""
    own = (spec for spec in specs if isinstance(spec, (ModelLayerSpec, HybridLayerSpec)))
    return [spec for spec in own if isinstance(spec, HybridLayerSpec) or spec.kind != "dummy"]


def local_window(spec: LayerSpec) -> int:
    """The window of a packed layer as `Scores` has it, `-n` for chunks; 0 where it has none."""
    return spec.local if isinstance(spec, WindowLayerSpec) else 0


def kind_of(spec: LayerSpec) -> str:
    """Layer type of a packed layer, as transformers names it."""
    if window_of(spec) is None:
        return "full_attention"
    return "chunked_attention" if local_window(spec) < 0 else "sliding_attention"


def asked_window(spec: LayerSpec) -> int | None:
    """The `sliding_window` that a model passes to the attention of a packed layer; chunks are in its mask alone."""
    return None if local_window(spec) < 0 else window_of(spec)


def grows(spec: LayerSpec | ModelLayerSpec) -> bool:
    """Whether a layer of this spec holds all tokens: it is packed and has no window."""
    return isinstance(spec, LayerSpec) and window_of(spec) is None


def hides(config: Any, window: int | None) -> bool:
    """Whether a window of `window` tokens (None: no window) is narrower than the model's positions and hides some."""
    positions = getattr(config, "max_position_embeddings", None)
    return window is not None and (positions is None or window < positions)


def hybrid_states(config: PretrainedConfig) -> list[int]:
    """Number of states beside the attention of each layer of a model; 0 for layers of other kinds."""
    types = _compat.layer_types(config.get_text_config(decoder=True))
    return [layer.states if layer.kind == "hybrid" else 0 for layer in types]


def model_layers(config: PretrainedConfig) -> list[ModelLayerSpec | None]:
    """What each layer of a model keeps of its own; None where it is packed.

    Full attention is packed, also beside an SSM, and windows or chunks that hide no position of the model.

    Args:
        config: the model's config, or its text config.

    Raises:
        UnsupportedError: a layer type that is neither packed nor left to the model; the message says why.
    """
    text = config.get_text_config(decoder=True)
    found: list[ModelLayerSpec | None] = []
    for layer in _compat.layer_types(text):
        own = ModelLayerSpec(layer.kind, layer.window, layer.states)
        if layer.reads is not None:
            found.append(ModelLayerSpec("dummy", reads=layer.reads))
        elif layer.kind in ("full_attention", "hybrid") or (layer.kind in WINDOWED and not hides(text, layer.window)):
            found.append(None)
        elif layer.kind in (*WINDOWED, *STATES, "dummy"):
            found.append(own)
        else:
            why = REFUSED.get(layer.kind, f"layers of the type {layer.kind}")
            raise UnsupportedError(f"{config.model_type} has {why}, which is not supported; use a stock cache")
    return found
