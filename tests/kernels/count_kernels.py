"""List the kernels that a process would compile for each method: `python count_kernels.py METHOD...`.

Lines are `METHOD cold NAME`, or `METHOD warm NAME` for kernels that calls compile after `step.warm` has compiled its
list. Methods do not share compiled kernels here.

Nothing is compiled or run, and no GPU is needed: each of Triton's launches is followed up to the point where it would
compile a missing kernel.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.warm import LayerShape, launches

# rows and tokens of prompts, each followed by steps of one token
SHAPES = [(1, 100), (1, 700), (1, 3000), (1, 20000), (2, 700), (3, 300), (8, 700), (16, 512), (32, 1000), (50, 700)]
HEADS, KV_HEADS, HEAD_DIM, NEW_TOKENS = 32, 8, 128, 64


class Hopper:
    """A driver without a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def follow_launches(see: Callable[..., None]) -> Iterator[None]:
    """In this context launches compile and run nothing. `see(kernel, signature, constants, options, attributes)` gets
    each kernel that was not there; afterwards none is, so that another context sees it again."""
    launch, compile_, device_of = JITFunction.run, JITFunction._do_compile, torch.cuda.device_of
    seen = []

    def compile_nothing(
        self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, *rest: Any
    ) -> object:
        see(self, signature, constants, options, attributes)
        seen.append(self)
        kernel = self.device_caches[device][0][key] = object()
        return kernel

    def launch_nothing(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    driver.set_active(Hopper())
    JITFunction._do_compile, JITFunction.run = compile_nothing, launch_nothing
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    try:
        yield
    finally:
        JITFunction._do_compile, JITFunction.run, torch.cuda.device_of = compile_, launch, device_of
        for kernel in seen:
            kernel.device_caches.clear()


def warm(spec: LayerSpec) -> None:
    """Compile what `patch` begins to compile."""
    shape = LayerShape(spec, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
    for one in launches(shape):
        one.kernel.warmup(*one.arguments, grid=one.grid, **one.options)


def main(*methods: str) -> None:
    for method in methods:
        name, settings = split_method(method)
        spec = replace(get_method(name)(**settings).last_layer_spec(KV_HEADS), impl="triton")
        for when in ("cold", "warm"):
            compiled: list[JITFunction] = []
            with follow_launches(lambda kernel, *_, compiled=compiled: compiled.append(kernel)):
                if when == "warm":
                    warm(spec)
                known = len(compiled)
                serve(spec)
            for kernel in sorted(kernel.fn.__name__ for kernel in compiled[known:]):
                print(method, when, kernel)


def serve(spec: LayerSpec, dim: int = HEAD_DIM, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    """Launch what each of the shapes needs."""
    for batch, prompt in shapes:
        layer = QAttnLayer(spec, prompt + NEW_TOKENS)
        for tokens in (prompt, 1, 1):
            q, k, v = (
                torch.empty(batch, heads, tokens, dim, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            if not layer.is_initialized:
                layer.lazy_initialization(k, v)
            span = torch.tensor([[0, tokens]] * batch, dtype=torch.int32)
            fused_step(q, k, v, span, layer.state, spec, Scores(dim**-0.5), 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
