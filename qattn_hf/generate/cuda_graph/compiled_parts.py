"""Compile the norms, MLPs and RoPE of a model for its captured steps.

Attention and the cache run as they are. The model keeps its forwards: they are replaced for the duration of one step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import modules
from qattn_hf.model.with_names import with_names

# rounds where eager code rounds, so that norms and MLPs are bit-identical
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
VARIANTS = 256  # compiled variants of one function: it has one for each batch size and shape of weights
KINDS = ("norms", "MLPs", "RoPE")
ACTIVATIONS = {"transformers.activations", "torch.nn.modules.activation"}

Function = Callable[..., Any]


class Part(NamedTuple):
    """A module with something to compile.

    Attributes:
        kind: one of `KINDS`.
        module: the module.
        called: RoPE's functions, by the global names that the module's forward calls. Empty: its whole forward is
            compiled.
    """

    kind: str
    module: nn.Module
    called: dict[str, Function]

    def forward(self, change: Callable[[Function], Function]) -> Function:
        """Return the module's forward after `change` of the functions to compile."""
        forward = type(self.module).forward
        if not self.called:
            return change(forward)
        return with_names(forward, **{name: change(function) for name, function in self.called.items()})


def parts_of(model: PreTrainedModel) -> Iterator[Part]:
    """Yield the parts of a model that can be compiled: code of Transformers over plain weights, without hooks."""
    for module in modules(decoder_of(model)):
        if not (_plain(module) and _of_transformers(type(module).forward)):
            continue
        name, own = type(module).__name__, inspect.unwrap(type(module).forward)
        called = {name: own.__globals__.get(name) for name in own.__code__.co_names if "rotary_pos_emb" in name}
        if name.endswith("RMSNorm"):
            yield Part("norms", module, {})
        elif name.endswith("MLP") and all(map(_linear_or_activation, module.children())):
            yield Part("MLPs", module, {})
        elif called and all(map(_of_transformers, called.values())):
            yield Part("RoPE", module, called)


def _plain(module: nn.Module) -> bool:
    """Return whether a module runs the forward of its class, in eval mode, over weights that are plain tensors."""
    own = vars(module)
    if own["training"] or "forward" in own or own["_forward_pre_hooks"] or own["_forward_hooks"]:
        return False
    return all(weight is None or type(weight) is nn.Parameter for weight in own["_parameters"].values())


def _of_transformers(function: Any) -> bool:
    """Return whether a function is code of a model in Transformers, which has no effects besides its result."""
    own = inspect.unwrap(function) if callable(function) else None
    return isinstance(own, FunctionType) and own.__module__.startswith("transformers.models.")


def _linear_or_activation(module: nn.Module) -> bool:
    return _plain(module) and (type(module) is nn.Linear or type(module).__module__ in ACTIVATIONS)


class CompiledParts:
    """Callable in place of a model, whose norms, MLPs and RoPE run compiled. One thread at a time may call it.

    Args:
        model: a model; the caller must hold a reference to it.

    Attributes:
        kinds: the kinds of parts found, such as `norms, MLPs and RoPE`.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)  # the pool holds this, and the model holds the pool
        self._compiled: dict[Function, Function] = {}
        found = {part.kind for part in parts_of(model)}
        self.kinds = " and ".join(", ".join(kind for kind in KINDS if kind in found).rsplit(", ", 1))

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    def __call__(self, **inputs: Any) -> Any:
        """Run the model on `inputs`. Functions that `compile` did not meet run as they are."""
        with _changed(self.model, lambda function: self._compiled.get(function, function)):
            return self.model(**inputs)

    def compile(self, **inputs: Any) -> tuple[Any, str | None]:
        """Run the model as it is, and compile its parts for the arguments that they get.

        Each compiled function runs once, so that nothing is left to compile.

        Returns:
            the model's output, and the message of the compiler's first error; None without one.
        """
        errors: list[str] = []  # texts, because a traceback would keep the cache alive

        def compiling(function: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not errors:
                    try:
                        self._compiled_of(function)(*args, **kwargs)
                    except Exception as error:
                        errors.append(" ".join(f"{type(error).__name__}: {error}".split()))
                return function(*args, **kwargs)

            return call

        with _changed(self.model, compiling), torch._dynamo.config.patch(recompile_limit=VARIANTS):
            return self.model(**inputs), next(iter(errors), None)

    def _compiled_of(self, function: Function) -> Function:
        if function not in self._compiled:
            compiled = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
            if compiled is function or torch._dynamo.config.disable:
                raise RuntimeError("the environment variable TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set")
            self._compiled[function] = compiled
        return self._compiled[function]


@contextmanager
def _changed(model: PreTrainedModel, change: Callable[[Function], Function]) -> Iterator[None]:
    """Make the calling thread run a model with `change` of its functions, within a `with` block.

    Compiled code depends on the mode of autograd, so this is always `no_grad`.
    """
    parts, owner = [*parts_of(model)], get_ident()

    def forward_of(part: Part) -> Function:
        plain, changed = type(part.module).forward, part.forward(change)

        def forward(*args: Any, **kwargs: Any) -> Any:  # other threads may run the model meanwhile
            return (changed if get_ident() == owner else plain)(*args, **kwargs)

        return forward

    try:
        for part in parts:
            part.module.forward = MethodType(forward_of(part), part.module)
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for part in parts:
            vars(part.module).pop("forward", None)
