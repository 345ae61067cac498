"""Decide from a text config which layers are packed, and which keep a cache layer of Transformers."""

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
    "hybrid_sliding": "sliding windows with linear attention or an SSM",
    "reference_sliding_attention": "sliding windows that keep a reference",
    "compressed_sparse_attention": "attention over compressed tokens",
    "heavily_compressed_attention": "attention over compressed tokens",
}


@dataclass(frozen=True)
class HybridLayerSpec(LayerSpec):
    """Spec of a packed layer that also has linear attention or an SSM, whose states stay unpacked.

    Attributes:
        states: number of convolution and recurrent states.
    """

    states: int = 1

    def __str__(self) -> str:
        return f"attention with {STATES['linear_attention']}"

    @property
    def rolls_back(self) -> bool:
        """Return whether `crop` can undo the tokens of drafts, which is false here."""
        return False


@dataclass(frozen=True)
class WindowLayerSpec(LayerSpec):
    """Spec of a packed layer with a sliding window, or with attention in chunks.

    Attributes:
        sliding_window: most tokens that a query sees, including itself. With chunks, a query sees its chunk.
        chunked: whether the layer attends in chunks. A chunk begins at a multiple of `sliding_window` positions.
        unquantized: whether keys and values keep the model's dtype, whatever the recipe's method.
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
    """What an unpacked layer keeps. It takes the place of a `LayerSpec`.

    Attributes:
        kind: layer type in Transformers: `sliding_attention`, `chunked_attention`, `linear_attention`, `conv`, `dummy`.
        window: tokens of the sliding window, or of a chunk. None for other layers.
        states: number of convolution and recurrent states.
        why: reason why a layer with a window is unpacked (`recipes/sliding.py`). None for other kinds.
        reads: for a `dummy`, the earlier layer whose keys and values it attends to. None if it has no attention.
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
        """Return whether `crop` can undo the tokens of drafts, once past states are recorded."""
        return self.kind != "linear_attention"


def window_of(spec: LayerSpec) -> int | None:
    """Return the tokens of a packed layer's sliding window, or None if it has no window."""
    return spec.sliding_window if isinstance(spec, WindowLayerSpec) else None


def of_method(spec: LayerSpec | ModelLayerSpec) -> bool:
    """Return whether the recipe's method packs a layer of this spec. Unquantized windows do not count."""
    return isinstance(spec, LayerSpec) and not (isinstance(spec, WindowLayerSpec) and spec.unquantized)


def own_states(specs: Iterable[LayerSpec | ModelLayerSpec | None]) -> list[ModelLayerSpec | HybridLayerSpec]:
    """Return the specs of layers that keep unpacked tensors, alone or together with packed ones."""
    own = (spec for spec in specs if isinstance(spec, (ModelLayerSpec, HybridLayerSpec)))
    return [spec for spec in own if isinstance(spec, HybridLayerSpec) or spec.kind != "dummy"]


def local_window(spec: LayerSpec) -> int:
    """Return the window of a packed layer as `Scores` has it: `-n` for chunks, 0 for no window."""
    return spec.local if isinstance(spec, WindowLayerSpec) else 0


def kind_of(spec: LayerSpec) -> str:
    """Return the layer type of a packed layer, as Transformers names it."""
    if window_of(spec) is None:
        return "full_attention"
    return "chunked_attention" if local_window(spec) < 0 else "sliding_attention"


def asked_window(spec: LayerSpec) -> int | None:
    """Return the `sliding_window` that a model passes to a packed layer's attention. Chunks are only in the mask."""
    return None if local_window(spec) < 0 else window_of(spec)


def grows(spec: LayerSpec | ModelLayerSpec) -> bool:
    """Return whether a layer of this spec holds all tokens: it is packed and has no window."""
    return isinstance(spec, LayerSpec) and window_of(spec) is None


def hides(config: Any, window: int | None) -> bool:
    """Return whether a window of `window` tokens (None: no window) is narrower than the model's positions."""
    positions = getattr(config, "max_position_embeddings", None)
    return window is not None and (positions is None or window < positions)


def hybrid_states(config: PretrainedConfig) -> list[int]:
    """Return the number of states of each hybrid layer of a model, and 0 for other layers."""
    types = _compat.layer_types(config.get_text_config(decoder=True))
    return [layer.states if layer.kind == "hybrid" else 0 for layer in types]


def model_layers(config: PretrainedConfig) -> list[ModelLayerSpec | None]:
    """Return what each layer of a model keeps unpacked, or None for a packed layer.

    Full attention is packed, even if the layer also has an SSM. So are windows and chunks that cover all positions of
    the model.

    Args:
        config: the model's config, or its text config.

    Raises:
        UnsupportedError: a layer's type is unsupported. The message says why.
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
