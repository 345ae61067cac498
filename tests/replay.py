"""Replay what a manager of continuous batching did, request by request, over separate caches.

A served answer may differ from the answer of `generate`, because a request may be read in other calls. `Recorder`
notes the calls that each request got, and every prefix, page and fork that it shared. `replay` repeats them for one
request at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from qattn_hf import QAttnCache
from qattn_kernels.layout import State

# Largest difference of two logits. Sums in fp32 differ by 1e-7 or less. One int8 code differs by 1e-5 to 2e-4.
TOLERANCE = 1e-5


class Read(NamedTuple):
    """Tokens that a forward reads for one request.

    Attributes:
        request: the request's id.
        ids: the tokens.
        past: tokens stored before.
        pages: pages of the request's blocks.
        logits: `[V]` for the next token, as the only entry; empty if the prompt goes on.
    """

    request: str
    ids: list[int]
    past: int
    pages: list[int]
    logits: list[torch.Tensor]


class Recorder:
    """Record the forwards of a manager, and what requests share.

    Args:
        manager: a manager with a pool.
        cancels: ids of requests to cancel, by the number of the forward that runs then.

    Attributes:
        events: in order, each a `Read`, or the name of a method of `Replay` with its arguments.
    """

    def __init__(self, manager: Any, cancels: dict[int, str] | None = None):
        processor = manager.batch_processor
        self.manager, self.cancels, self.forwards = manager, cancels or {}, 0
        self.cache = processor.cache
        self.events: list[Read | tuple[str, tuple[Any, ...]]] = []
        for name in ("begin_with", "fork_blocks", "free_blocks"):
            _note(self.cache.allocator, name, partial(self._event, name))
        _note(self.cache.allocator, "keep", self._keep)
        _note(self.cache, "begin", self._begin)
        _note(processor.model_runner, "_sample", self._sample)

    def _event(self, name: str, *args: Any) -> None:
        self.events.append((name, args))

    def _keep(self, name: str, request: str, past: int, drop: int) -> None:
        kept = self.cache.allocator.to_keep
        if kept and kept[-1][0] == name:
            self._event("keep", name, request, drop)

    def _begin(self, requests: Any) -> None:
        self.forwards += 1
        if self.forwards in self.cancels:
            self.manager.cancel_request(self.cancels[self.forwards])
        self.sampled = []
        for one in requests:
            name, ids = one.state.request_id, list(one.state.tokens_to_process)
            read = Read(name, ids, one.state.position_offset, self.cache.allocator.pages_of(name), [])
            self.events += [read] if ids else []
            self.sampled += [read] if one.has_new_token else []

    def _sample(self, scores: torch.Tensor, *args: Any) -> None:
        for read, logits in zip(self.sampled, scores[0], strict=False):
            read.logits.append(logits.clone())

    @property
    def reads(self) -> list[Read]:
        return [event for event in self.events if isinstance(event, Read)]

    def shared(self) -> int:
        """Count the requests that began with tokens of another one."""
        seen, found = set(), 0
        for read in self.reads:
            found += read.request not in seen and read.past > 0
            seen.add(read.request)
        return found

    def read_again(self) -> int:
        """Count the requests that began anew after their blocks were taken."""
        begun = [read.request for read in self.reads if read.past == 0]
        return len(begun) - len(set(begun))


def _note(owner: Any, name: str, note: Callable[..., None]) -> None:
    own = getattr(owner, name)

    @wraps(own)
    def noted(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        note(*args)
        return found

    setattr(owner, name, noted)


class Replay:
    """Caches of single requests and of kept prefixes, by name. They get the calls that were recorded.

    Args:
        block: tokens of a page.
        shares: whether requests share pages without a row.
    """

    def __init__(self, model: PreTrainedModel, block: int, shares: bool):
        self.model, self.block, self.shares = model, block, shares
        self.caches: dict[str, QAttnCache] = {}
        self.tables: dict[str, list[int]] = {}  # pages whose bytes a cache has
        self.pages: dict[int, list[State]] = {}  # the last bytes written to each page, by layer

    def read(self, read: Read) -> torch.Tensor:
        """Repeat a call. Return the logits `[V]` after its last token."""
        name, end = read.request, read.past + len(read.ids)
        if name not in self.caches:
            self.caches[name], self.tables[name] = QAttnCache.for_model(self.model), []
            if read.past:  # tokens of shared pages, whose bytes replace what this call writes
                self._feed(name, [1] * read.past)
        table = self.tables[name]
        for index in range(read.past // self.block if self.shares else 0):
            if table[index : index + 1] != [read.pages[index]]:
                for mine, theirs in zip(self._views(name, index), self.pages[read.pages[index]], strict=True):
                    for key, tensor in mine.items():
                        tensor.copy_(theirs[key])
        logits = self._feed(name, read.ids)
        self.tables[name] = read.pages
        for index in range(read.past // self.block, end // self.block if self.shares else 0):
            self.pages[read.pages[index]] = copy.deepcopy(self._views(name, index))
        return logits

    def _feed(self, name: str, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found = self.model(torch.tensor([ids]), past_key_values=self.caches[name], logits_to_keep=1)
        return found.logits[0, -1]

    def _views(self, name: str, index: int) -> list[State]:
        """Return the tensors of a block in every layer."""
        return [
            {
                key: layer.state[key].narrow(spec.block_dim, index, 1)
                for key, spec in layer.tensor_specs().items()
                if spec.block_dim is not None
            }
            for layer in self.caches[name].packed
        ]

    def begin_with(self, name: str, prefix: str) -> None:
        self.caches[name], self.tables[name] = copy.deepcopy(self.caches[prefix]), []

    def fork_blocks(self, source: str, name: str, past: int) -> None:
        self.caches[name], self.tables[name] = copy.deepcopy(self.caches[source]), self.tables[source]

    def keep(self, prefix: str, name: str, drop: int) -> None:
        self.caches[prefix] = copy.deepcopy(self.caches[name])
        self.caches[prefix].crop(-drop)

    def free_blocks(self, name: str, *args: Any) -> None:
        self.caches.pop(name, None)


def replay(model: PreTrainedModel, recorder: Recorder) -> list[tuple[Read, torch.Tensor]]:
    """Return each recorded call that chose a token, with the logits `[V]` of a separate cache."""
    allocator = recorder.cache.allocator
    again, found = Replay(model, allocator.tokens_per_page, bool(allocator.use_block_sharing)), []
    for event in recorder.events:
        if isinstance(event, Read):
            logits = again.read(event)
            found += [(event, logits)] if event.logits else []
        else:
            getattr(again, event[0])(*event[1])
    return found


def assert_replayed(model: PreTrainedModel, recorder: Recorder) -> None:
    """Assert that every served token had the logits of a separate cache with the same calls."""
    pairs = replay(model, recorder)
    assert pairs
    for read, logits in pairs:
        where = f"{read.request}, {len(read.ids)} tokens after {read.past}"
        torch.testing.assert_close(read.logits[0], logits, rtol=0, atol=TOLERANCE, msg=lambda text: f"{where}: {text}")  # noqa: B023


def batch_invariant(model: PreTrainedModel) -> PreTrainedModel:
    """Compute linear layers in fp64, so that a token gets the same fp32 numbers in every batch.

    Otherwise a value at the border of two codes may get either code.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = partial(_linear, module)
    return model


def _linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else module.bias.double()
    return linear(x.double(), module.weight.double(), bias).to(x.dtype)
