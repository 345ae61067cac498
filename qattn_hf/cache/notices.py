"""Warnings that a patch gives once: layers without kernels, kernels with another GPU's launch configurations, steps
without capture, quantized values that nobody reads."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from qattn_hf.messages import cut
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, of_method, window_of
from qattn_kernels.formats.traits import low_kind
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.step.prompt import sees_raw

if TYPE_CHECKING:
    from qattn_hf.cache.cache import QAttnCache
    from qattn_hf.layer.layer import QAttnLayer

NOT_THE_USER = {"qattn_hf", "qattn_kernels", "transformers", "torch", "accelerate", "peft", "contextlib"}
SAFE_BITS = 4  # fewest safe bits of windows: with fewer, a released checkpoint produced unusable text
DROPPED = 2  # caches dropped unread before the next one triggers the warning; a single one may be a trial


def warn(text: str) -> None:
    """Warn with the line of the user's code that called this package, if the stack shows one."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _package(frame) in NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def of_layers(
    config: PretrainedConfig, specs: Sequence[LayerSpec | ModelLayerSpec], impl: str, device_type: str
) -> None:
    """Warn about layers without kernels and about packed windows with few bits. Arguments as in `of_reference`."""
    of_reference(config, specs, impl, device_type)
    of_windows(config, specs)


def of_reference(
    config: PretrainedConfig, specs: Sequence[LayerSpec | ModelLayerSpec], impl: str, device_type: str
) -> None:
    """Warn about layers on a GPU without kernels, which run the reference.

    Args:
        config: the model's config.
        specs: one for each layer.
        impl: the recipe's implementation.
    """
    if impl != "auto" or device_type != "cuda":
        return
    layers: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        if isinstance(spec, LayerSpec) and spec.impl == "reference":
            sizes = head_sizes(config, i)
            reason = no_triton(device_type) or unsupported(spec, sizes.kv, sizes.dim, sizes.v_dim)
            layers.setdefault(reason or "the recipe asks for it", []).append(i)
    for reason, found in layers.items():
        where = "every layer" if len(found) == len(specs) else f"layers {cut(', '.join(map(str, found)), 60)}"
        warn(
            f"the plain PyTorch reference computes {where}, many times slower than kernels: {reason}. Change that "
            "setting, patch with impl='reference' to silence this warning, or with impl='triton' to get an error"
        )


def borrowed_configurations(specs: Sequence[LayerSpec | ModelLayerSpec], device_type: str) -> str | None:
    """Return why layers use the launch configurations of another GPU; None if they do not, or without kernels.

    Args:
        specs: one for each layer.
        device_type: type of the model's device.
    """
    if device_type != "cuda" or not any(isinstance(spec, LayerSpec) and spec.impl == "triton" for spec in specs):
        return None
    from qattn_kernels.step.kernel_facts import borrowed  # loads Triton

    return borrowed()


def of_windows(config: PretrainedConfig, specs: Sequence[LayerSpec | ModelLayerSpec]) -> None:
    """Warn about packed windows with fewer than `SAFE_BITS` bits, which degrade the text.

    Args:
        config: the model's config.
        specs: one for each layer.
    """
    for i, spec in enumerate(specs):
        if not isinstance(spec, LayerSpec) or window_of(spec) is None or not of_method(spec):
            continue
        heads = head_sizes(config, i).kv
        if any(low_kind(fmt, heads) or 0 < fmt.core.kernel_bits(heads) < SAFE_BITS for fmt in (spec.k, spec.v)):
            warn(
                f"sliding windows are packed in fewer than {SAFE_BITS} bits, which broke the text of Gemma 3 270M. "
                "Use sliding='exact', the default, or 4 bits"
            )
            return


def quantizes(spec: LayerSpec) -> bool:
    """Return whether a layer quantizes keys or values."""
    return of_method(spec) and not (spec.k.core.in_model_precision and spec.v.core.in_model_precision)


def reads_no_code(spec: LayerSpec) -> bool:
    """Return whether a layer quantizes, but a prompt attends to its unquantized keys and values."""
    return quantizes(spec) and spec.compute.prefill == "model" and sees_raw(spec)


def written_once(layer: QAttnLayer) -> bool:
    """Return whether at most one call wrote to a layer, including compiled and captured calls."""
    return layer.edits <= 1 and layer._used is not None and not layer.replayed_by_others


class Notices:
    """Warnings that a patch has given, and caches of its calls that were not read yet.

    Copies and pickles of the model start without any.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._unread: list[weakref.ref[QAttnCache]] = []

    def __deepcopy__(self, memo: Any) -> Notices:
        return Notices()

    def __reduce__(self) -> Any:
        return Notices, ()

    def once(self, kind: str, text: str) -> None:
        """Warn, the first time for this kind of warning."""
        if kind not in self._given:
            self._given.add(kind)
            warn(text)

    def of_eager(self, reason: str) -> None:
        """Warn that decode steps run eagerly although the recipe asked for capture."""
        self.once(
            "eager",
            f"qattn_hf decodes eagerly, slower than with a CUDA graph: {reason}. "
            "Patch with decode='eager' to silence this warning, or with decode='graph' to get an error",
        )

    def of_configurations(self, reason: str) -> None:
        """Warn that kernels run with the launch configurations of another GPU."""
        self.once("configurations", f"{reason}, which may be slower. `qattn bench tiles` measures this GPU")

    def of_gradients(self) -> None:
        """Warn that a call in eval mode attends in full precision, because it records gradients and has no cache."""
        self.once(
            "gradients",
            "use_cache=False with gradients: this call attends in full precision, as before patch. Under "
            "torch.no_grad() it attends through a packed cache",
        )

    def before_another(self) -> None:
        """Forget caches that compiled steps have read. Only the host's counts show it, and the next call may free a
        cache."""
        caches = [(ref, ref()) for ref in self._unread]
        self._unread = [ref for ref, cache in caches if cache is None or all(map(written_once, cache.packed))]

    def _why_unread(self, kwargs: dict[str, Any]) -> str | None:
        """Return why nothing will read the quantized values of a call's cache, or None if a later call may."""
        if kwargs.get("labels") is not None:
            return "labels were given to a call that makes its own cache"
        if not kwargs["use_cache"]:
            return "use_cache=False makes a cache for each call and drops it"
        if sum(ref() is None for ref in self._unread) >= DROPPED:
            return "one call after another made a cache that nothing read"
        return None

    def of_call(self, cache: QAttnCache, kwargs: dict[str, Any], tokens: int, made: bool, asked: bool | None) -> None:
        """Warn if a call gives full-precision results because no token reads quantized values, and the caller may not
        know.

        Args:
            cache: the call's cache, before the call.
            kwargs: the call's arguments, with `use_cache` resolved.
            tokens: new tokens per row.
            made: True if the caller passed no cache.
            asked: `use_cache` as the caller passed it. A caller who asks for a cache goes on with it.
        """
        if "unread" in self._given:
            return
        if any(layer.edits for layer in cache.layers):
            self._unread = [ref for ref in self._unread if ref() not in (None, cache)]
            return
        if not made or asked or not _leaves_codes_unread(cache, tokens):
            return
        why = self._why_unread(kwargs)
        if why is None:
            self._unread.append(weakref.ref(cache))
            return
        method = cache.recipe.method
        self.once(
            "unread",
            f"{why}: a prompt with {method} attends to unquantized tokens, so this result equals full precision and "
            "shows no loss. `qattn compare MODEL --method ...`, with the method and settings of this patch, measures "
            "the loss",
        )


def _leaves_codes_unread(cache: QAttnCache, tokens: int) -> bool:
    """Return whether all quantized layers read unquantized tokens in a first call of `tokens` tokens per row."""
    quantized = [layer.spec for layer in cache.packed if of_method(layer.spec)]
    if tokens <= SHORT_CALL and any(tokens >= spec.window.block for spec in quantized):
        return False  # short calls read the tokens that they packed
    return bool(quantized) and all(map(reads_no_code, quantized))
