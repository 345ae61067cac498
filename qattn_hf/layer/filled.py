"""Fill packed layers with random quantized values, without a prefill, for size measurements and benchmarks."""

from __future__ import annotations

import torch

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State, Window
from qattn_kernels.step.states import at_slots, bool_to_bits, to_bits

# dtypes of lengths and positions; quantized values and scales have other dtypes
BOOKKEEPING = (torch.int32, torch.int64)


def fill(layer: QAttnLayer, length: int) -> None:
    """Set every row of a layer to the state after `length` random tokens.

    Tensors are filled by dtype and name. A new format needs extra code here only if some values are invalid.

    Raises:
        ValueError: `length` exceeds the capacity.
    """
    window, state = layer.spec.window, layer.state
    closed = closed_blocks(window, length)
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


def closed_blocks(window: Window, length: int) -> int:
    """Return the number of packed blocks of a row of `length` tokens."""
    return max(0, length - window.residual) // window.span * (window.span // window.block)


def packed_tokens(spec: LayerSpec, length: int) -> int:
    """Return the number of packed tokens of a row of `length` tokens."""
    windowed = spec.k.windowed or spec.v.windowed
    return closed_blocks(spec.window, length) * spec.window.block if windowed else length


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
        # centre values so that 4-bit `code * channel_scale + zero_point` fits INT8; the scale is filled first, by name
        # order
        tensor.copy_((-15 * state[name.removesuffix("zero_point") + "channel_scale"].int()) // 2)
    elif tensor.dtype == torch.uint8:
        tensor.random_(0, 127)  # 127 is NaN in FP8
    elif tensor.dtype == torch.int8:
        tensor.random_(-119, 120)
    elif kind in ("x", "ring", "sink"):
        tensor.normal_()
    elif tensor.dtype == torch.int16:  # scales, stored as bits
        tensor.copy_(to_bits(torch.empty(tensor.shape, device=tensor.device).uniform_(0.02, 0.03)))
    else:  # scales
        tensor.uniform_(0.02, 0.03)
