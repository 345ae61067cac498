"""A running manager of continuous batching, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from test_continuous_batching import config
from transformers import (
    PreTrainedModel,
)

NEW = 8  # tokens of an answer
SECONDS = 60  # after which an answer is missing: none of these takes one second on an idle machine


@contextmanager
def running(model: PreTrainedModel, blocks: int = 16, **settings: Any) -> Iterator[Any]:
    """Run a manager over a pool of `blocks` blocks of 64 tokens."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    batching = {"num_blocks": blocks, "page_size": 64, "max_batch_tokens": 512, **settings.pop("batching", {})}
    generation = config(**{"max_new_tokens": NEW, **settings})
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=ContinuousBatchingConfig(**batching), timeout=10
    ) as manager:
        yield manager


def outputs(manager: Any, ids: Iterable[str]) -> dict[str, Any]:
    """Wait for the last outputs of these requests. Outputs of other requests are dropped."""
    found: dict[str, Any] = {}
    wanted, deadline = set(ids), time.monotonic() + SECONDS
    while wanted - found.keys():
        assert time.monotonic() < deadline, f"no answer to {sorted(wanted - found.keys())}"
        one = manager.get_result(timeout=0.05)
        if one is not None and one.is_finished():
            found[one.request_id] = one
    return found


def answer(manager: Any, prompt: list[int], **settings: Any) -> list[int]:
    request_id = manager.add_request(prompt, **settings)
    one = outputs(manager, [request_id])[request_id]
    assert one.error is None
    return one.generated_tokens


class Fault:
    """Wraps a function and raises at chosen calls."""

    def __init__(self, owner: Any, name: str, at: Iterable[int], error: BaseException):
        self.own, self.at, self.error, self.calls = getattr(owner, name), set(at), error, 0
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            raise self.error
        return self.own(*args, **kwargs)


def refuse_token(model: PreTrainedModel, token: int, layer: int, error: Exception) -> None:
    """Let every forward that reads `token` fail in a layer, after the layers before it have written."""
    seen = SimpleNamespace(bad=False)

    def look(module: Any, args: Any) -> None:
        seen.bad = bool((args[0] == token).any())

    def fail(module: Any, args: Any) -> None:
        if seen.bad:
            raise error

    model.model.embed_tokens.register_forward_pre_hook(look)
    model.model.layers[layer].mlp.register_forward_pre_hook(fail)


def break_token(model: PreTrainedModel, token: int) -> None:
    """Let the keys of `token` be NaN in every layer."""
    seen = SimpleNamespace(at=None)

    def look(module: Any, args: Any) -> None:
        seen.at = args[0] == token

    def spoil(module: Any, args: Any, out: Any) -> Any:
        return out.masked_fill(seen.at[..., None], float("nan"))

    model.model.embed_tokens.register_forward_pre_hook(look)
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(spoil)
