"""Changes of a model's weights, which make its caches stale: steps of optimizers, and writes in place.

Fused optimizers change weights without counting that in `Tensor._version`, so steps are counted too. Not noticed are
writes through `Tensor.data`, which bypass PyTorch's own checks, and parameters that are replaced by others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


class Weights(NamedTuple):
    """Counts of changes of a decoder's weights.

    Attributes:
        steps: steps of optimizers that have some of its weights.
        first: writes in place to one weight.
        writes: writes in place to each weight, by `id`.
    """

    steps: int
    first: int
    writes: dict[int, int]


def weights_of(decoder: torch.nn.Module) -> Weights:
    """Return the counts of a decoder. Walks over its parameters."""
    _watch()
    writes = {id(weight): _version(weight) for weight in _weights(decoder)}
    return Weights(_steps.setdefault(decoder, 0), _first(decoder), writes)


def trained(then: Weights, now: Weights) -> bool:
    """Return whether weights have changed between two counts of one decoder. Other or more weights are no change."""
    return then.steps != now.steps or any(then.writes.get(key, count) != count for key, count in now.writes.items())


def seem_unchanged(decoder: torch.nn.Module, then: Weights) -> bool:
    """Return whether no optimizer stepped and one weight is unchanged. Fast enough for every decode step."""
    return _steps.get(decoder, 0) == then.steps and _first(decoder) == then.first


def _weights(decoder: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of all modules but those on the meta device, whose numbers are elsewhere.

    Several times faster than `parameters`, which makes names."""
    stack: list[torch.nn.Module | None] = [decoder]
    while stack:
        if (module := stack.pop()) is not None:
            own = vars(module)
            stack += own["_modules"].values()
            for weight in own["_parameters"].values():
                if weight is not None and not weight.is_meta:
                    yield weight


def _first(decoder: torch.nn.Module) -> int:
    weight = next(_weights(decoder), None)
    return 0 if weight is None else _version(weight)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, which does not count
        return 0


@functools.cache
def _watch() -> None:
    """Count steps of all optimizers of this process from now on."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for decoder in [*_steps]:
        if any(id(weight) in stepped for weight in _weights(decoder)):
            _steps[decoder] += 1
