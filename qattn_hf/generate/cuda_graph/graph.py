"""Decode steps as CUDA graphs: the whole step of `generate`, eager, compiled in parts or as a whole, captured once and
then replayed."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.pool import Pool
from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.cuda_graph.capture import STRICT, SyncWatch, fingerprint, record, refusal
from qattn_hf.generate.cuda_graph.compiled_parts import CompiledParts
from qattn_hf.messages import cut
from qattn_hf.model._compat import CACHE
from qattn_kernels.layer.spec import SHORT_CALL

BEFORE, BEFORE_DRAFTS = 1, 3  # eager steps of a kind before its capture
# Replays of a kind of step before its parts are compiled, by `decode`. `auto` compiles once these replays would have
# saved what compiling costs: 1.3 ms each for an 8B model on an H200, and 4 s in all.
FUSE_AFTER = {"auto": 3_000, "fused": 0}
PLAIN = (bool, int, float, str, type(None))


@dataclass
class CapturedStep:
    """One captured decode step.

    Attributes:
        inputs: tensors that the graph reads, in the order of `tensors_of`.
        replay: replays the graph.
        outputs: leaves of the model's output, tensors in the graph's memory. `CACHE` replaces the cache, because the
            next call has another cache object over the same arenas.
        spec: tree structure of the leaves.
    """

    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    outputs: list[Any]
    spec: TreeSpec

    def run(self, tensors: list[torch.Tensor], cache: QAttnCache) -> Any:
        """Replay the step on `tensors`, in the order of `inputs`. The output is copied out of the graph's memory."""
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        self.replay()
        leaves = [x.clone() if isinstance(x, torch.Tensor) else cache if x is CACHE else x for x in self.outputs]
        return tree_unflatten(leaves, self.spec)


class GraphedCall:
    """Callable in place of the model in `generate`. Decode steps and checks of drafts run as CUDA graphs, other calls
    eagerly.

    The first step with new arenas or another input signature runs eagerly, which compiles and loads kernels. The second
    one is captured, and later ones are replayed. Drafts have many lengths, and a capture takes as long as several eager
    runs. So a draft length is captured at its fourth call. Each `generate` makes a new `GraphedCall`; captured steps
    stay in the pool.

    Steps of one token are captured again with compiled norms, MLPs and RoPE after `FUSE_AFTER` replays. If that fails,
    the earlier captured steps stay.

    Args:
        model: a patched model.
        pool: the pool of that model.
        decode: the recipe's setting. With `graph` and `fused`, a model that cannot be captured or compiled is an error.
        compiled: the model's call by `torch.compile`, captured in place of the eager call. It must not use CUDA graphs.
    """

    def __init__(self, model: PreTrainedModel, pool: Pool, decode: str, compiled: Callable[..., Any] | None = None):
        # weak: a cache holds its beam search's `GraphedCall`, and the model holds its last cache
        self._model, self._compiled = weakref.ref(model), compiled
        self.pool, self.decode = pool, decode
        self.captured, self.uncaptured = ("graph", "eager") if compiled is None else ("compile", "compile")
        with pool.lock:  # another thread may replace forwards meanwhile
            pool.serve(fingerprint(model))

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy or pickle captures nothing

    @property
    def model(self) -> PreTrainedModel:
        """The patched model; the caller must hold a reference to it."""
        model = self._model()
        assert model is not None
        return model

    def _step(self, fused: bool) -> Callable[..., Any]:
        """Return the call that is captured as a step."""
        if fused:
            return self._parts
        return self.model if self._compiled is None else self._compiled

    @property
    def _parts(self) -> CompiledParts:
        if self.pool.parts is None:
            self.pool.parts = CompiledParts(self.model)
        parts: CompiledParts = self.pool.parts
        return parts

    def __call__(self, **inputs: Any) -> Any:
        """Run the model on `inputs`, which include the cache.

        Raises:
            CapacityError: no room for the token; nothing was written.
            UnsupportedError: the model cannot be captured or compiled, and `decode` is `graph` or `fused`.
        """
        cache, ids = inputs[CACHE], inputs.get("input_ids")
        if ids is None or ids.shape[1] > SHORT_CALL or not cache.layers[0].is_initialized:
            return self.model(**inputs)
        tensors, tokens = list(tensors_of(inputs)), ids.shape[1]
        if reason := self.pool.refused or _unfit(inputs, tensors, cache):
            return self._uncaptured(inputs, cache, reason)
        self.pool.allocate(cache.reserve, tokens)  # before the look-up of steps, because it may replace tensors
        steps, kind = self.pool.steps_of(cache.packed), _signature(inputs)
        fused = tokens == 1 and self._fuses(kind)
        known = steps.get((kind, fused), 0)
        if not isinstance(known, CapturedStep) and known < (BEFORE if tokens == 1 else BEFORE_DRAFTS):
            warms = self.pool.watched or self._step(fused) is self.model  # the watched step is eager
            out = self._warm_up(inputs, cache, fused) if self.pool.watched else self._watched(inputs, cache)
            steps[kind, fused] = known + warms
            return out
        with self.pool.lock:  # steps share memory: another thread's step would overwrite these results
            if (step := self._captured(steps, kind, fused, inputs, cache)) is not None:
                return step.run(tensors, cache)
        return self(**inputs)  # eagerly, or without compiled parts

    def _captured(
        self, steps: dict[Hashable, Any], kind: Hashable, fused: bool, inputs: dict[str, Any], cache: QAttnCache
    ) -> CapturedStep | None:
        """Return the captured step of a kind, which is counted, and captured first if it is new. None if that fails."""
        step = steps.get((kind, fused))
        if isinstance(step, CapturedStep):
            cache.count(inputs["input_ids"].shape[1])
        elif step is None or (step := self._capture(inputs, cache, fused)) is None:  # None: another thread dropped it
            return None
        else:
            steps[kind, fused] = step
            if fused:
                self.pool.forget((kind, False))  # after the capture, which takes the memory of these steps
        self.pool.replays[kind] += 1
        if fused:
            cache.ran("fused", f"{self._parts.kinds} compiled")
        else:
            cache.ran(self.captured, self.pool.unfused)
        return step

    def _fuses(self, kind: Hashable) -> bool:
        """Return whether steps of this kind run compiled parts."""
        return self.pool.unfused is None and self.pool.replays[kind] >= FUSE_AFTER.get(self.decode, math.inf)

    def _uncaptured(self, inputs: dict[str, Any], cache: QAttnCache, reason: str) -> Any:
        """Run a step without capture, for `reason`."""
        cache.ran(self.uncaptured, reason)
        if not self.pool.refused:  # a refusal was reported when it was found
            self.model._qattn.notices.of_eager(reason)
        return self._step(fused=False)(**inputs)

    def _watched(self, inputs: dict[str, Any], cache: QAttnCache) -> Any:
        """Run the model's first step, eagerly, under `SyncWatch`."""
        self.pool.watched = True
        with SyncWatch(cache.device) as watch:
            out = self.model(**inputs)
        if watch.waiting_op:
            self._refuse(f"its forward waits for the device ({watch.waiting_op})", cache)
        return out

    def _warm_up(self, inputs: dict[str, Any], cache: QAttnCache, fused: bool) -> Any:
        """Run a step on inputs laid out like the capture's: nothing can be compiled during a capture."""
        if fused:
            return self._compile_parts(inputs)
        if self._compiled is None:
            return self.model(**inputs)
        before = cache.before_capture()  # compiled code does not count on the host
        out = self._compiled(**_static(inputs))
        before.put_back(cache.packed)
        cache.count(inputs["input_ids"].shape[1])
        return out

    def _compile_parts(self, inputs: dict[str, Any]) -> Any:
        """Run a step eagerly, and compile its parts meanwhile."""
        with self.pool.lock:  # one thread at a time replaces forwards
            out, error = self._parts.compile(**_static(inputs))
        if error is not None:
            self._refuse_parts(f"compiling its {self._parts.kinds} failed ({cut(error, 200)})")
        elif not self._parts.kinds:
            self._refuse_parts("no norm, MLP or RoPE of it can be compiled")
        return out

    def _capture(self, inputs: dict[str, Any], cache: QAttnCache, fused: bool) -> CapturedStep | None:
        """Capture a step and count it on the host for its first replay. Return None if it cannot be captured."""
        before, static = cache.before_capture(), _static(inputs)
        try:
            run = functools.partial(self._step(fused), **static)
            replay, out = self.pool.allocate(record, run, cache.device, self.pool.graphs)
        except RuntimeError as error:
            before.put_back(cache.packed)
            reason = f"failed ({_first_line(error)})"
            if fused:
                self._refuse_parts(f"capturing its compiled {self._parts.kinds} {reason}", error)
            else:
                self._refuse(f"capturing it {reason}", cache, error)
            return None
        before.put_back(cache.packed)
        cache.count(inputs["input_ids"].shape[1])
        leaves, spec = tree_flatten(out)
        leaves = [CACHE if x is cache else x for x in leaves]
        return CapturedStep(list(tensors_of(static)), replay, leaves, spec)

    def _refuse(self, reason: str, cache: QAttnCache, cause: Exception | None = None) -> None:
        if self.decode in STRICT:
            raise UnsupportedError(refusal(reason, self.decode)) from cause
        self.pool.refused = reason
        cache.ran(self.uncaptured, reason)
        how = "eagerly" if self.uncaptured == "eager" else "without a CUDA graph"
        warnings.warn(f"qattn_hf decodes {how}: this model cannot be captured, {reason}", stacklevel=4)

    def _refuse_parts(self, reason: str, cause: Exception | None = None) -> None:
        """Go on with steps without compiled parts, for `reason`, which the report shows."""
        if self.decode == "fused":
            raise UnsupportedError(refusal(reason, self.decode)) from cause
        self.pool.unfused = reason


def tensors_of(inputs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among a model's inputs in order, including tensors in dicts (masks by layer type)."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_of(value)


def _static(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the inputs with contiguous tensors."""
    with torch.inference_mode(False):  # tensors made under inference_mode could not be written outside it
        return _map_tensors(inputs, lambda x: x.clone(memory_format=torch.contiguous_format))


def _map_tensors(inputs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return _map_tensors(value, change)
        return change(value) if isinstance(value, torch.Tensor) else value

    return {name: changed(value) for name, value in inputs.items()}


def _signature(inputs: dict[str, Any]) -> Hashable:
    """Return a key of calls that one captured step can serve: names, shapes and dtypes of tensors, and plain values."""

    def kind(value: Any) -> Hashable:
        if isinstance(value, dict):
            return _signature(value)
        return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    return tuple([(name, kind(value)) for name, value in inputs.items() if name != CACHE])


def _unfit(inputs: dict[str, Any], tensors: list[torch.Tensor], cache: QAttnCache) -> str | None:
    """Return the reason why no model can be captured with these inputs; None if it can."""
    for name, value in inputs.items():
        if name != CACHE and not isinstance(value, (*PLAIN, torch.Tensor, dict)):
            return f"its input {name} is a {type(value).__name__}"
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return "its attention mask has two dimensions and grows with each step"
    if any(x.device != cache.device for x in tensors):
        return "an input is on another device"
    if torch.is_autocast_enabled(cache.device.type):  # autocast frees its copies of weights when it ends
        return "autocast is on"
    return None


def _first_line(error: BaseException) -> str:
    """Return the first line of the first error in a chain. A failed capture raises more errors as it ends."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
