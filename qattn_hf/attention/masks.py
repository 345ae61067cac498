"""Checks of a user's 2-D mask against the cache, at once or without a wait for the device."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from transformers import Cache, GenerationConfig

from qattn_hf.errors import UnsupportedError
from qattn_hf.model.device import capturing


class Pending(NamedTuple):
    """Facts of a step's mask on their way to the host.

    Attributes:
        width, tokens: columns of the mask, and new ones of the step.
        facts: `mask_facts` on the host, whole after `arrived`.
        arrived: event of the copy.
    """

    width: int
    tokens: int
    facts: torch.Tensor
    arrived: torch.cuda.Event


_pending: weakref.WeakKeyDictionary[Cache, Pending] = weakref.WeakKeyDictionary()


def mask_facts(attention_mask: torch.Tensor, cached: int | torch.Tensor) -> torch.Tensor:
    """int64 `[2]` on the mask's device: columns that the cache holds, and the first row of a mask `[B, S]` that has
    zeros between real tokens, -1 without one."""
    real = attention_mask.bool()
    holes = (real[:, :1].int().sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)) > 1
    row = torch.where(holes.any(), holes.int().argmax(), -1)
    return torch.stack([torch.as_tensor(cached, device=row.device).long(), row.long()])


def check_mask(attention_mask: torch.Tensor, cached: int | torch.Tensor, tokens: int) -> None:
    """Check a 2-D mask `[B, S]` against the cache; waits for the device.

    Args:
        cached: columns that the cache holds, padding included. tokens: new columns.

    Raises:
        UnsupportedError: another width than `cached + tokens`, or zeros between real tokens: padding stands on the
            left, or on the right of a single call.
    """
    _refuse(attention_mask.shape[-1], tokens, mask_facts(attention_mask, cached), "")


def check_prompt_mask(attention_mask: torch.Tensor, generation_config: GenerationConfig) -> None:
    """Check the 2-D mask of a prompt in `generate`: every row must be zeros (padding), then ones.

    Without a mask from the user, `generate` takes every pad token of the prompt for padding, unless it is an end token
    too; the message then says so.

    Raises:
        UnsupportedError: padding on the right or between tokens, or a row without a real token.
    """
    try:
        check_mask(attention_mask, 0, attention_mask.shape[1])
        empty = ~attention_mask.bool().any(1)
        if bool(empty.any()):
            row = int(empty.nonzero()[0])
            raise UnsupportedError(f"row {row} of the attention_mask has no real token: leave that row out")
        if not bool(attention_mask[:, -1].all()):
            raise UnsupportedError("generate needs padding on the left; this attention_mask has it on the right")
    except UnsupportedError as error:
        pad, eos = generation_config._pad_token_tensor, generation_config._eos_token_tensor
        if pad is None or (eos is not None and bool(torch.isin(eos, pad).any())):
            raise
        raise UnsupportedError(
            f"{error}. If you gave none, transformers made it and took every token {int(pad)} (pad_token_id) for "
            "padding: pass attention_mask=torch.ones_like(input_ids) where that token is text"
        ) from None


def check_mask_later(attention_mask: torch.Tensor, cache: Cache, tokens: int) -> None:
    """Check a step's mask as `check_mask` does, but at the first call with this cache after the device has its facts.

    On a CPU that is at once.

    Raises:
        UnsupportedError: on a CPU, as `check_mask`.
    """
    if waits_for_nothing(attention_mask):
        return check_mask(attention_mask, cache.get_seq_length(), tokens)
    if cache in _pending or capturing():  # one at a time: a mask that is wrong stays wrong
        return None
    facts, arrived = to_host(mask_facts(attention_mask, cache.get_seq_length()))
    _pending[cache] = Pending(attention_mask.shape[-1], tokens, facts, arrived)
    return None


def check_earlier_mask(cache: Cache, wait: bool) -> None:
    """Check the mask of an earlier step whose facts have arrived.

    Args:
        wait: for the device, until they have.

    Raises:
        UnsupportedError: that mask was wrong.
    """
    if (pending := _pending.get(cache)) is None:
        return
    if wait:
        pending.arrived.synchronize()
    if pending.arrived.query():
        del _pending[cache]
        _refuse(pending.width, pending.tokens, pending.facts, ". An earlier step ran without it: take a fresh cache")


def waits_for_nothing(mask: torch.Tensor) -> bool:
    """Whether the host reads a mask without a wait for a device."""
    return mask.device.type == "cpu"


def to_host(facts: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy on the host of `facts` on a GPU, and the event after which it is whole."""
    copy = torch.empty(facts.shape, dtype=facts.dtype, device="cpu", pin_memory=True).copy_(facts, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(facts.device))
    return copy, arrived


def _refuse(width: int, tokens: int, facts: torch.Tensor, late: str) -> None:
    cached, row = facts.tolist()
    if width != cached + tokens:
        raise UnsupportedError(
            f"the attention_mask has {width} columns, but the cache holds {cached} and {tokens} are new: it must have "
            f"{cached + tokens}, the cached tokens included{late}"
        )
    if row >= 0:
        raise UnsupportedError(
            f"the attention_mask of row {row} has zeros between real tokens; a packed cache takes padding on the left, "
            f"or on the right of a single call. Move the padding to the left{late}"
        )
