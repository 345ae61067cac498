"""Check a user's 2-D mask against the cache, at once or without waiting for the device."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from transformers import Cache, GenerationConfig

from qattn_hf.errors import UnsupportedError
from qattn_hf.model.device import capturing


class Pending(NamedTuple):
    """Facts about a step's mask that are being copied to the host.

    Attributes:
        width, tokens: columns of the mask, and new tokens of the step.
        facts: `mask_facts` on the host, complete after `arrived`.
        arrived: event of the copy.
    """

    width: int
    tokens: int
    facts: torch.Tensor
    arrived: torch.cuda.Event


_pending: weakref.WeakKeyDictionary[Cache, Pending] = weakref.WeakKeyDictionary()


def mask_facts(attention_mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return int64 `[3]` on the mask's device: the columns that the cache holds, and two row indices.

    The first index is the first row of the mask `[B, S]` with zeros between real tokens. The second is the first row
    with zeros for real tokens of the cache. Each is -1 if there is none.
    """
    real = attention_mask.bool()
    cached = torch.as_tensor(0 if cache is None else cache.get_seq_length(), device=real.device).long()
    holes = (real[:, :1].int().sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)) > 1
    hidden = torch.zeros_like(holes)
    written = [layer for layer in cache.packed if layer.is_initialized] if cache is not None else []
    if written and len(real) in (1, written[0].batch):
        padding = cached - written[0].state["length"].to(real.device)
        past = torch.arange(real.shape[1], device=real.device) < cached
        hidden = (past & ~real).sum(1) > padding
    return torch.stack([cached, *(torch.where(rows.any(), rows.int().argmax(), -1) for rows in (holes, hidden))])


def check_mask(attention_mask: torch.Tensor, cache: Any, tokens: int | None = None) -> None:
    """Check a 2-D mask `[B, S]` against the cache. Waits for the device.

    Args:
        cache: a `QAttnCache`, or None for an empty one.
        tokens: number of new columns, or None for the rest of the mask.

    Raises:
        UnsupportedError: the number of columns is not the cached plus the new ones; zeros are between real tokens,
            or hide real tokens of the cache. Padding belongs on the left, or on the right of a single call.
    """
    _refuse(attention_mask.shape[-1], tokens, mask_facts(attention_mask, cache), "")


def check_prompt_mask(attention_mask: torch.Tensor, generation_config: GenerationConfig, cache: Any) -> None:
    """Check the 2-D mask of a prompt in `generate`: every row must be zeros (padding), then ones.

    If the user passes no mask, `generate` treats every pad token of the prompt as padding, unless it is also an end
    token. The message then says so.

    Args:
        cache: the `QAttnCache` that the prompt continues, or None.

    Raises:
        UnsupportedError: padding on the right, between tokens or over tokens of the cache; or a row without a real
            token.
    """
    try:
        check_mask(attention_mask, cache)
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
            f"{error}. If you passed no mask, transformers made one that treats every token {int(pad)} (pad_token_id) "
            "as padding: pass attention_mask=torch.ones_like(input_ids) if that token is text"
        ) from None


def check_mask_later(attention_mask: torch.Tensor, cache: Cache, tokens: int) -> None:
    """Start a check of a step's mask, as in `check_mask`. A later call with this cache finishes the check without
    waiting.

    On a CPU the check is done at once.

    Raises:
        UnsupportedError: on a CPU, as in `check_mask`.
    """
    if waits_for_nothing(attention_mask):
        return check_mask(attention_mask, cache, tokens)
    if cache in _pending or capturing():  # one check at a time: a wrong mask stays wrong
        return None
    facts, arrived = to_host(mask_facts(attention_mask, cache))
    _pending[cache] = Pending(attention_mask.shape[-1], tokens, facts, arrived)
    return None


def check_earlier_mask(cache: Cache, wait: bool) -> None:
    """Finish the check of an earlier step's mask if its facts have arrived.

    Args:
        wait: True to wait for the device until they have.

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
    """Return whether the host can read a mask without waiting for a device."""
    return mask.device.type == "cpu"


def to_host(facts: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Copy `facts` from a GPU to the host. Return the copy and the event that marks it complete."""
    copy = torch.empty(facts.shape, dtype=facts.dtype, device="cpu", pin_memory=True).copy_(facts, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(facts.device))
    return copy, arrived


def _refuse(width: int, tokens: int | None, facts: torch.Tensor, late: str) -> None:
    cached, row, hidden = facts.tolist()
    if tokens is not None and width != cached + tokens:
        raise UnsupportedError(
            f"the attention_mask has {width} columns, but the cache holds {cached} and {tokens} are new: it must have "
            f"{cached + tokens}, the cached tokens included{late}"
        )
    if row >= 0:
        raise UnsupportedError(
            f"the attention_mask of row {row} has zeros between real tokens; a packed cache takes padding on the left, "
            f"or on the right of a single call. Move the padding to the left{late}"
        )
    if hidden >= 0:
        raise UnsupportedError(
            f"the attention_mask of row {hidden} has zeros for real tokens of the cache, which a mask cannot hide: "
            f"keep the mask of earlier calls, or read the other tokens into a fresh cache{late}"
        )
