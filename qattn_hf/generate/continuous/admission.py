"""Check each request before it is queued: prompt ids, lengths, sampling settings and stop tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from qattn_hf.errors import QAttnError
from qattn_hf.generate.continuous.sampling import Sampling
from qattn_hf.messages import shown

STRETCHED = ("linear", "dynamic", "yarn")  # RoPE scalings whose factor multiplies the config's number of positions
LARGEST_SEED = 2**63 - 1
MORE_ROOM = "a pool of more blocks (num_blocks of ContinuousBatchingConfig, `qattn serve --blocks`)"


class RequestError(QAttnError):
    """A request cannot be served. Other requests are not affected."""


class EngineError(QAttnError):
    """A request cannot be served now: the loop has ended or is ending, or the queue is full."""


class Limits(NamedTuple):
    """The limits of a request, from the pool and the model.

    Attributes:
        vocabulary: size of the vocabulary; token ids are below it.
        pool: capacity of the pool in tokens.
        positions: number of positions of the model; None if unbounded.
    """

    vocabulary: int
    pool: int
    positions: int | None

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its answer together."""
        return self.pool if self.positions is None else min(self.pool, self.positions)

    def ids(self, given: Any) -> list[int]:
        """Return the ids of a prompt as ints.

        Raises:
            RequestError: the prompt is empty, too long, not a list of integers, or has ids outside the vocabulary.
        """
        try:
            count = len(given)
        except TypeError:
            raise RequestError(f"a prompt is a list of token ids, this is {shown(given)}") from None
        if count == 0:
            raise RequestError("the prompt is empty: send at least one token")
        if count + 1 > self.longest:
            raise RequestError(
                f"the prompt has {count:,} tokens, and prompt and answer share {self._room()}: shorten the prompt"
                + self._way_out()
            )
        try:
            found = [operator.index(token) for token in (given.tolist() if hasattr(given, "tolist") else given)]
        except TypeError:
            raise RequestError(f"a prompt is a list of integers, one a token, this is {shown(given)}") from None
        strange = next((token for token in found if not 0 <= token < self.vocabulary), None)
        if strange is not None:
            raise RequestError(
                f"token id {shown(strange)} is outside the model's vocabulary of {self.vocabulary:,} tokens: use the "
                "model's tokenizer"
            )
        return found

    def new_tokens(self, prompt: int, given: Any) -> int:
        """Return the number of new tokens of a request.

        Args:
            prompt: tokens of the prompt.
            given: the requested number; None means the largest number that fits.

        Raises:
            RequestError: `given` is below 1, not an integer, or larger than the room left after the prompt.
        """
        room = self.longest - prompt
        if given is None:
            return room
        count = -1 if isinstance(given, bool) or not hasattr(given, "__index__") else operator.index(given)
        if count < 1:
            raise RequestError(f"max_new_tokens is an integer of 1 or more, this is {shown(given)}")
        if count > room:
            raise RequestError(
                f"the prompt's {prompt:,} tokens and max_new_tokens={shown(given)} need more than {self._room()}: ask "
                f"for at most {room:,} new tokens" + self._way_out()
            )
        return count

    def _room(self) -> str:
        owner = "the pool" if self.longest == self.pool else "the model's positions"
        return f"the {self.longest:,} tokens of {owner}"

    def _way_out(self) -> str:
        return f", or make {MORE_ROOM}" if self.longest == self.pool else ""


def positions_of(config: Any) -> int | None:
    """Return the number of positions of a model with this config; None if the config does not say."""
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if positions is not None and one.get("rope_type") in STRETCHED:
            original = one.get("original_max_position_embeddings") or positions
            positions = max(positions, int(original * one.get("factor", 1)))
    return positions


def stop_tokens(given: Any) -> list[int]:
    """Return the token ids that end an answer. Negative ids never match a token.

    Raises:
        RequestError: `given` is neither an integer, nor integers, nor None.
    """
    try:
        return [
            operator.index(token)
            for token in (given if isinstance(given, Iterable) else [-1 if given is None else given])
        ]
    except TypeError:
        raise RequestError(f"eos_token_id is an integer or a list of integers, this is {shown(given)}") from None


def sampling_of(default: Sampling, settings: Mapping[str, Any]) -> Sampling:
    """Return `default` updated with the settings of a request. A setting that is None keeps its default.

    Raises:
        RequestError: a setting is unknown, or its value is not allowed.
    """
    reason = unsupported_request(settings)
    if reason is not None:
        raise RequestError(reason)
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("temperature") == 0:
        given.update(temperature=1.0, do_sample=False)
    return default._replace(**given)


def unsupported_request(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why a request cannot have these settings; None if all are allowed.

    Args:
        settings: settings of one request by name, as `add_request` takes them. None means the generation config's
            value.
    """
    for name, value in settings.items():
        if name not in Sampling._fields:
            return (
                f"{name} cannot be set for one request of a batch: leave it out, serve without batching, or use one of "
                + ", ".join(Sampling._fields)
            )
        if value is not None and not _allowed(name, value):
            return f"{name}={shown(value)} is not allowed: {name} is {_ALLOWED[name]}"
    return None


_ALLOWED = {
    "do_sample": "True or False",
    "temperature": "0, for the likeliest token, or a number from 0.01 to 100",
    "top_k": "an integer of 0 or more; 0 keeps all tokens",
    "top_p": "a number above 0 and at most 1",
    "min_p": "a number from 0 to 1",
    "seed": f"an integer from 0 to {LARGEST_SEED}",
}


def _allowed(name: str, value: Any) -> bool:
    if name == "do_sample":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int if name in ("top_k", "seed") else (int, float)):
        return False
    return {
        "temperature": value == 0 or 0.01 <= value <= 100,
        "top_k": 0 <= value <= LARGEST_SEED,
        "top_p": 0 < value <= 1,
        "min_p": 0 <= value <= 1,
        "seed": 0 <= value <= LARGEST_SEED,
    }[name]
