"""Take blocks from the front of every row, which a sliding window has left behind."""

from __future__ import annotations

import torch

from qattn_kernels.layer.spec import SHORT_CALL
from qattn_kernels.layout import State, TensorSpec, Window


def held_back(window: Window, sliding_window: int) -> int:
    """Tokens before a row's end that must be there so that it goes on as if all were: those that the next query sees,
    or that can be open, and a packed block before them, since what a row's first block fixes stays while it has one."""
    return max(sliding_window - 1, window.span + window.residual) + window.block


def ring_blocks(window: Window, sliding_window: int) -> int:
    """Capacity, in blocks, of a layer with a sliding window of so many tokens.

    What `held_back` says and a crop within the horizon may take, a call of few tokens, and blocks for some more tokens,
    so that blocks are moved seldom.
    """
    tokens = held_back(window, sliding_window) + window.horizon + SHORT_CALL
    blocks = -(-tokens // window.block) + 1
    return blocks + max(2, window.span // window.block, blocks // 8)


def most_left_behind(window: Window, sliding_window: int, tokens: int) -> int:
    """What the host knows of `left_behind`: the blocks of a row that holds `tokens` tokens, none of them in a short
    block; at least as many as of any other row."""
    needed = tokens - held_back(window, sliding_window) - window.horizon
    return max(0, needed) // window.block


def left_behind(state: State, window: Window, sliding_window: int) -> torch.Tensor:
    """int64 `[B]`: the first packed blocks of each row that no later query sees, not even after a crop within the
    horizon."""
    needed = state["length"] - held_back(window, sliding_window) - window.horizon
    packed = torch.arange(state["block_len"].shape[1], device=needed.device) < state["closed"][:, None]
    return (packed & (state["block_pos"] + state["block_len"] <= needed[:, None])).sum(1)


def drop_front(state: State, tensors: dict[str, TensorSpec], count: torch.Tensor) -> None:
    """Remove the first `count` blocks, int64 `[B]`, of every row, in place and without waiting for the device.

    Later blocks move to the front, codes as they are; behind them are zeros, as in a row that was never as long. Row
    positions stay: `block_pos` says where a row's first block begins.

    Args:
        tensors: shape and role of the state tensors (`layer.state.layer_tensors`), of a layer without a sink pool,
            whose table knows slots.
    """
    for name, spec in tensors.items():
        if spec.block_dim is None:
            continue
        x, blocks = state[name], spec.shape[spec.block_dim]
        source = torch.arange(blocks, device=x.device) + count[:, None]
        source = source.view(-1, *[1] * (spec.block_dim - 1), blocks, *[1] * (x.dim() - spec.block_dim - 1))
        moved = x.gather(spec.block_dim, source.clamp(max=blocks - 1).expand_as(x))
        x.copy_(moved.masked_fill_(source >= blocks, 0))
    state["closed"].sub_(count)


def first_position(state: State) -> torch.Tensor:
    """int32 `[B]`: row position of the oldest token that each row holds."""
    return torch.where(state["closed"] > 0, state["block_pos"][:, 0], state["open_start"])


def beyond_crop(state: State, window: Window, sliding_window: int, drop: int) -> torch.Tensor:
    """bool `[B]`: whether a row without its last `drop` tokens would need blocks that were taken from its front."""
    first, left = first_position(state), (state["length"] - drop).clamp(min=0)
    return (first > 0) & (first > left - held_back(window, sliding_window))
