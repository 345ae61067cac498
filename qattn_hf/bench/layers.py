"""Packed layers for benchmarks, filled with random codes without a prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qattn_hf.layer import QAttnLayer
from qattn_hf.methods import Method
from qattn_kernels.formats.scales import to_bits
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.table import at_slots
from qattn_kernels.reference.rows import bool_to_bits

BOOKKEEPING = (torch.int32, torch.int64)  # lengths and positions; codes and numbers have other types


@dataclass(frozen=True)
class Heads:
    """Shape of one attention layer: query heads, KV heads, head dim, and dtype of queries, keys and values."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in model precision."""
        return 2 * self.kv * self.dim * self.dtype.itemsize

    def row(self) -> dict[str, Any]:
        """The shape as fields of a JSON row: `heads`, `kv_heads`, `head_dim`, `dtype`."""
        sizes = {"heads": self.query, "kv_heads": self.kv, "head_dim": self.dim}
        return {**sizes, "dtype": str(self.dtype).removeprefix("torch.")}


def make_layer(settings: Method, heads: Heads, batch: int, capacity: int, device: torch.device) -> QAttnLayer:
    """An empty packed layer with room for `capacity` tokens a row, by a method's settings."""
    spec = settings.last_layer_spec(heads.kv)
    reason = no_triton(device.type) or unsupported(spec, heads.kv, heads.dim, heads.dim)
    layer = QAttnLayer(replace(spec, impl=settings.chosen_impl(device.type, reason)), capacity)
    nothing = torch.empty(batch, heads.kv, 0, heads.dim, dtype=heads.dtype, device=device)
    layer.lazy_initialization(nothing, nothing)
    return layer


def fill(layer: QAttnLayer, length: int) -> None:
    """Put every row of a layer into its state after `length` random tokens.

    Tensors are filled by dtype and name, so a new format needs nothing here unless only some numbers are valid.

    Raises:
        ValueError: `length` exceeds the capacity.
    """
    window, state = layer.spec.window, layer.state
    closed = max(0, length - window.residual) // window.span * (window.span // window.block)
    if length > layer.capacity:
        raise ValueError(f"{length} tokens do not fit into a layer of {layer.capacity}")
    for name, tensor in state.items():
        if tensor.dtype not in BOOKKEEPING:
            _fill_numbers(state, name)
    for name in ("length", "longest"):
        state[name].fill_(length)
    state["columns_seen"].fill_(length)
    state["closed"].fill_(closed)
    state["open_start"].fill_(closed * window.block)
    state["block_len"][:, :closed] = window.block
    first = torch.arange(closed, dtype=torch.int32, device=state["block_pos"].device) * window.block
    state["block_pos"][:, :closed] = first
    for name, tensor in state.items():
        if name.endswith(".head_of"):
            tensor.copy_(torch.arange(tensor.shape[1], device=tensor.device))
    if layer.spec.sink_pool.num and closed:
        _fill_sinks(layer, closed)
    layer._used = layer._slots_used()


def _fill_sinks(layer: QAttnLayer, closed: int) -> None:
    """Fill the sink pool and its window of evicted sinks, spread over the whole context."""
    pool, state = layer.spec.sink_pool, layer.state
    count = pool.num + pool.window
    entry = torch.arange(state["sink.pos"].shape[2], device=state["sink.pos"].device)
    used = (entry < count).expand_as(state["sink.pos"])
    block, offset = entry * closed // count, entry % layer.spec.window.block
    slot = torch.where(used, block * layer.spec.window.block + offset, 0)
    for name in ("pos", "slot"):
        state[f"sink.{name}"].copy_(slot)
    state["sink.born"].copy_(torch.where(used, block + 1, 0))
    state["sink.evicted"].copy_(torch.where(used & (entry >= pool.num), closed, 0))
    state["dropped"].copy_(bool_to_bits(at_slots(used, slot, layer.capacity).view(*state["dropped"].shape[:3], -1)))


def _fill_numbers(state: State, name: str) -> None:
    tensor, kind = state[name], name.rpartition(".")[2]
    if kind == "dropped":
        tensor.zero_()
    elif kind == "channel_scale":
        tensor.random_(5, 16)
    elif kind == "zero_point" and tensor.dtype == torch.int8:
        # centred, so that 4-bit `code * channel_scale + zero_point` fits INT8; the scale comes first by name
        tensor.copy_((-15 * state[name.removesuffix("zero_point") + "channel_scale"].int()) // 2)
    elif tensor.dtype == torch.uint8:
        tensor.random_(0, 127)  # which is no number in FP8
    elif tensor.dtype == torch.int8:
        tensor.random_(-119, 120)
    elif kind in ("x", "ring", "sink"):
        tensor.normal_()
    elif tensor.dtype == torch.int16:  # scales, as bits
        tensor.copy_(to_bits(torch.empty(tensor.shape, device=tensor.device).uniform_(0.02, 0.03)))
    else:  # scales
        tensor.uniform_(0.02, 0.03)


def bookkeeping(layers: list[QAttnLayer]) -> Callable[[], None]:
    """A function that resets the lengths of `layers` to their present values, so that a step can run repeatedly.

    Codes stay: the next step overwrites those of the last one.
    """
    tensors = [t for layer in layers for t in layer.state.values() if t.dtype in BOOKKEEPING]
    saved = [t.clone() for t in tensors]

    def restore() -> None:
        torch._foreach_copy_(tensors, saved)

    return restore


def bytes_read(layer: QAttnLayer, tokens: int) -> int:
    """Bytes of a layer's block tensors for `tokens` tokens a row: what a decode step reads."""
    block_tensors = (layer.state[name] for name, spec in layer.tensor_specs().items() if spec.block_dim is not None)
    return sum(t.nbytes for t in block_tensors) * tokens // layer.capacity
