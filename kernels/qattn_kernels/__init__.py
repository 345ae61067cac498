"""Attention over packed KV caches: each operation in plain PyTorch, which is its specification, and in Triton.

This package does not depend on transformers or `qattn_hf`. Importing it loads neither Triton nor a GPU driver.
Short names everywhere: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, T new tokens, S cached tokens,
D head dim, NB blocks of capacity. Tensors are `[B, H, T, D]`.

Each entry imports only entries above it:

- `chip`: properties of a GPU. `layout`: sizes of a layer's state tensors. `jit`: Triton functions that kernels share.
- `formats`: storage of keys and values, one folder per format: `reference.py` in PyTorch, `jit.py` for kernels.
- `layer`: a layer's settings as text, its state tensors, and the limits of the kernels.
- `reference`: attention in PyTorch. `launch`: code that kernel launches share.
- `ops`: append, decode, prefill, rotate, sink_pool, crop and others, one folder each.
- `step`: one call of a layer as a registered operator. `step.states`: edits of a layer's state between calls.

Packages above import names of `formats` and `formats.traits`, format classes of `formats.*.reference`, `chip`,
`layout` and `launch.plan`, and modules of `layer` and `step`. Everything else is internal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_kernels.formats import Format, get_format
    from qattn_kernels.layer.scores import Scores
    from qattn_kernels.layer.spec import LayerSpec, decode_spec
    from qattn_kernels.layer.support import unsupported
    from qattn_kernels.step.operator import CapacityError, attend
    from qattn_kernels.step.stock_cache import attend_over

__all__ = [
    "CapacityError",
    "Format",
    "LayerSpec",
    "Scores",
    "attend",
    "attend_over",
    "decode_spec",
    "get_format",
    "unsupported",
]

_HOMES = {
    "formats": ("Format", "get_format"),
    "layer.scores": ("Scores",),
    "layer.spec": ("LayerSpec", "decode_spec"),
    "layer.support": ("unsupported",),
    "step.operator": ("CapacityError", "attend"),
    "step.stock_cache": ("attend_over",),
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first asked for."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"qattn_kernels.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
