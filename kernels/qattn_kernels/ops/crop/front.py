"""Remove the blocks at the front of every row that its sliding window has passed."""

from __future__ import annotations

import torch

from qattn_kernels.layer.spec import SHORT_CALL
from qattn_kernels.layout import State, TensorSpec, Window


def held_back(window: Window, sliding_window: int) -> int:
    """Tokens at the end of a row that it must keep to compute the same results as with all its tokens.

    The next query sees some of them and open blocks hold some. One packed block before them stays as well: a row keeps
    what its first block has fixed only while it has a packed block.
    """
    return max(sliding_window - 1, window.span + window.residual) + window.block


def ring_blocks(window: Window, sliding_window: int) -> int:
    """Capacity, in blocks, of a layer with a sliding window of `sliding_window` tokens.

    It fits the tokens of `held_back`, the tokens that a crop within the horizon may remove, and a short call. Some
    spare blocks make moves rare.
    """
    tokens = held_back(window, sliding_window) + window.horizon + SHORT_CALL
    blocks = -(-tokens // window.block) + 1
    return blocks + max(2, window.span // window.block, blocks // 8)


def most_left_behind(window: Window, sliding_window: int, tokens: int) -> int:
    """Upper bound of `left_behind` that the host can compute: a row of `tokens` tokens without a short block."""
    needed = tokens - held_back(window, sliding_window) - window.horizon
    return max(0, needed) // window.block


def left_behind(state: State, window: Window, sliding_window: int) -> torch.Tensor:
    """Count the packed blocks at the front of each row that no later query sees, even after a crop within the horizon.

    Returns:
        int64 `[B]`.
    """
    needed = state["length"] - held_back(window, sliding_window) - window.horizon
    packed = torch.arange(state["block_len"].shape[1], device=needed.device) < state["closed"][:, None]
    return (packed & (state["block_pos"] + state["block_len"] <= needed[:, None])).sum(1)


def drop_front(state: State, tensors: dict[str, TensorSpec], count: torch.Tensor) -> None:
    """Remove the first `count` blocks, int64 `[B]`, of every row, in place and without waiting for the device.

    Later blocks move to the front with their codes unchanged, and zeros follow them, as in a row that was never longer.
    Row positions stay: `block_pos` says where a row's first block begins.

    Args:
        tensors: shape and role of the state tensors (`layer.state.layer_tensors`). The layer must not have a sink
            pool, whose table stores slots.
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
    """bool `[B]`: whether a row without its last `drop` tokens would need blocks removed from its front."""
    first, left = first_position(state), (state["length"] - drop).clamp(min=0)
    return (first > 0) & (first > left - held_back(window, sliding_window))
