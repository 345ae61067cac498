"""Which models can be captured, what a captured step depends on, and the capture itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from qattn_hf.model.device import device_of, modules

Result = TypeVar("Result")

STRICT = ("graph", "fused")  # settings of `decode` that refuse a model rather than run its steps eagerly
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Transformers' expert implementations that route without waiting for the device
ON_DEVICE = {"grouped_mm", "batched_mm"}
ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
KNOWN_HOOKS = {"qattn_hf", "transformers", "accelerate"}  # packages whose hooks do nothing that a replay would skip


def refusal(reason: str, setting: str = "graph") -> str:
    """Return the error message for a `decode` that this model does not support."""
    how = "compile" if setting == "compile" else "capture"
    return f"decode='{setting}' cannot {how} this model: {reason}; use decode='auto', or 'eager'"


def why_not(model: PreTrainedModel) -> str | None:
    """Return the reason why a model's decode steps cannot be captured; None if nothing before a run forbids it."""
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1 or {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()) - devices:
        return "its weights are on several devices"
    device_type = device_of(model).type
    if device_type != "cuda":
        return f"the model is on the {device_type}"
    if "meta" in devices:
        return "its weights are offloaded, and come to the device layer by layer"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "its quantized weights cannot be captured"
    if (rope_type := changing_rope(model)) is not None:
        return f"its rope scaling is {rope_type}"
    config = model.config.get_text_config(decoder=True)
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS) and not _routes_on_device(model):
        return "its experts are routed on the host"
    return None


def changing_rope(model: PreTrainedModel) -> str | None:
    """Return the RoPE scaling whose frequencies depend on the length of a call, `dynamic` or `longrope`; else None."""
    kinds = [str(vars(module).get("rope_type", "")) for module in model.modules()]
    return next((rope_type for rope_type in ("dynamic", "longrope") if rope_type in " ".join(kinds)), None)


def _routes_on_device(model: PreTrainedModel) -> bool:
    implementations = set(model.get_experts_implementation().values()) - {None}
    return bool(implementations) and implementations <= ON_DEVICE and model._can_set_experts_implementation()


def fingerprint(model: torch.nn.Module) -> Hashable:
    """Return a key of all that a captured step depends on: weights, hooks, modules, adapters. About 1 ms for 300
    weights."""
    parts: list[Any] = []
    for module in modules(model):
        own, kind = vars(module), type(module)
        parts += (kind, own["training"], own.get("forward"), *own["_forward_pre_hooks"], *own["_forward_hooks"])
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                parts += (_address(tensor), tensor.dtype)
        if "_active_adapter" in own or "_disable_adapters" in own:  # peft switches adapters by plain attributes
            parts.append(str([own.get(name) for name in ADAPTER]))
    return tuple(parts)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a weight, or the `id` of a tensor subclass: quantized weights may have no address."""
    return tensor.data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else id(tensor)


def python_hook(model: torch.nn.Module) -> str | None:
    """Return the name of a forward hook that a replay would wrongly skip; None if there is none."""
    own = (vars(module) for module in modules(model))
    hooks = [hook for o in own for name in ("_forward_pre_hooks", "_forward_hooks") for hook in o[name].values()]
    for hook in (
        *hooks,
        *torch_module._global_forward_pre_hooks.values(),
        *torch_module._global_forward_hooks.values(),
    ):
        function = hook.func if isinstance(hook, functools.partial) else hook
        if str(getattr(function, "__module__", None)).split(".")[0] not in KNOWN_HOOKS:
            return str(getattr(function, "__qualname__", type(function).__name__))
    return None


def _counts_set(x: torch.Tensor, indices: Sequence[torch.Tensor | None], value: Any = None, *_: Any) -> bool:
    """Whether `x[indices]`, or `x[indices] = value`, asks the device how many elements of a mask are set.

    One mask and a number do not: torch runs `masked_fill_`. Embeddings split by tensor parallelism do that.
    """
    given = [index for index in indices if index is not None]
    if len(given) == 1 and value is not None and value.dim() == 0 and value.device.type == "cpu":
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in given)


class SyncWatch(TorchDispatchMode):
    """Dispatch mode that records the first operation of a model's step that waits for the device.

    A wait inside a capture fails and leaves torch's allocator and generators broken, so steps are checked before they
    are captured. The cache's own operator is one call here, and does not wait when it is captured.

    Attributes:
        waiting_op: name of the first such operation, empty if none.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.waiting_op = device, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.waiting_op and self._waits(func, args, kwargs or {}):
            self.waiting_op = str(func)
        return func(*args, **(kwargs or {}))

    def _waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if self.device not in {t.device for t in tensors}:
            return False
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            ends = {t.device.type for t in tensors} | {torch.device(kwargs.get("device") or self.device).type}
            return len(ends) > 1
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            return _counts_set(*args)
        return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures, one per device, so that cuBLAS allocates its workspace once."""
    return torch.cuda.Stream(device)


_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator keeps pointers to graphs whose capture failed


def record(
    run: Callable[[], Result], device: torch.device, graphs: WeakSet[torch.cuda.CUDAGraph]
) -> tuple[Callable[[], None], Result]:
    """Capture the work that `run` launches in a CUDA graph, without executing it.

    Args:
        run: launches work on `device`; tensors that it reads must keep their addresses.
        graphs: graphs that are never replayed at the same time as this one. It shares their memory and joins them.

    Returns:
        a function that replays the graph, and the result of `run`: tensors in the graph's memory, filled by a replay.

    Raises:
        RuntimeError: something in `run` cannot be captured; nothing was executed.
    """
    graph = torch.cuda.CUDAGraph()
    shared = next(iter(graphs), None)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(
                graph,
                pool=None if shared is None else shared.pool(),
                stream=_side_stream(device),
                capture_error_mode="thread_local",  # other threads may pin or free memory meanwhile
            ):
                out = run()
        except RuntimeError:
            _failed.append(graph)
            torch.cuda.set_stream(stream)  # torch leaves its capture stream active if a capture fails
            _reset_generator(device)
            raise
    graphs.add(graph)
    return graph.replay, out


def _reset_generator(device: torch.device) -> None:
    """Capture a trivial graph: after a failed capture torch's generator stays in capture mode until one succeeds."""
    graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with torch.cuda.graph(graph, stream=_side_stream(device)):
        tensor.add_(1)
