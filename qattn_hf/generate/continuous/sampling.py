"""Choose the next token of each request by the request's settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

CHILD = "__child#"  # Transformers appends this to a request's id for each further answer


class Sampling(NamedTuple):
    """Sampling settings of a request.

    Attributes:
        do_sample: False takes the most likely token.
        temperature: above 0.
        top_k: 0 keeps all tokens.
        top_p: in (0, 1]; 1 keeps all tokens.
        min_p: in [0, 1]; 0 keeps all tokens.
        seed: makes a request's draws the same in every batch; None draws from PyTorch's generator.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


class Draw(NamedTuple):
    """One token to choose.

    Attributes:
        sampling: settings of its request.
        request_id: id of its request; answers to one prompt draw differently.
        position: position of the token, counted from the first token of the prompt.
    """

    sampling: Sampling
    request_id: str
    position: int


def taken(processors: list[Any], do_sample: bool) -> tuple[Sampling, list[Any]]:
    """Split Transformers' logits processors into the settings of `Sampling` and the remaining processors."""
    values: dict[str, Any] = {}
    rest = []
    for one in processors:
        if isinstance(one, TemperatureLogitsWarper):
            values["temperature"] = one.temperature
        elif isinstance(one, TopKLogitsWarper):
            values["top_k"] = one.top_k
        elif isinstance(one, TopPLogitsWarper):
            values["top_p"] = one.top_p
        elif isinstance(one, MinPLogitsWarper):
            values["min_p"] = one.min_p
        else:
            rest.append(one)
    return Sampling(do_sample, **values), rest


def choose(scores: torch.Tensor, draws: Sequence[Draw], logprobs: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choose one token per row.

    A draw takes the largest quotient of probability and exponential variate. Non-finite logits then spoil only their
    own row. `torch.multinomial` would raise for the whole batch, and on a GPU would end the process's CUDA context.

    Args:
        scores: float32 `[N, V]`, logits.
        draws: settings of the first rows; further rows belong to no request.
        logprobs: True to return log-probabilities.

    Returns:
        int64 `[N]`, the chosen tokens, and their float32 log-probabilities `[N]` or None.
    """
    rows = [row for row, draw in enumerate(draws) if draw.sampling.do_sample]
    if rows:
        where = torch.tensor(rows, device=scores.device)
        drawn = [draws[row] for row in rows]
        warped = warp(scores[where], [draw.sampling for draw in drawn])
        tokens = scores.argmax(-1).index_copy(0, where, _drawn(warped.softmax(-1), drawn))
        scores = scores.index_copy(0, where, warped) if logprobs else scores
    else:
        tokens = scores.argmax(-1)
    return tokens, scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0] if logprobs else None


def warp(scores: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Scale logits `[N, V]` by temperature and set tokens excluded by top_k, top_p or min_p to -inf."""

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([[getattr(one, name)] for one in settings], dtype=dtype, device=scores.device)

    scores = scores / column("temperature")
    if all(one.top_k == 0 and one.top_p == 1 and one.min_p == 0 for one in settings):
        return scores
    found, order = scores.sort(-1, descending=True)
    top_k = column("top_k", torch.int64)
    last = found.gather(1, (top_k - 1).clamp(0, scores.shape[1] - 1))  # tokens as likely as the last kept one stay
    found = found.masked_fill((top_k > 0) & (found < last), -torch.inf)
    likely = found.softmax(-1)
    out = (likely.cumsum(-1) - likely >= column("top_p")) | (likely < column("min_p") * likely[:, :1])
    out[:, 0] = False
    return torch.empty_like(scores).scatter_(1, order, found.masked_fill(out, -torch.inf))


def _drawn(probabilities: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    noise = torch.empty_like(probabilities).exponential_()
    for row, draw in enumerate(draws):
        if draw.sampling.seed is not None:
            noise[row].exponential_(generator=_generator(draw, noise.device))
    tiny = torch.finfo(noise.dtype).tiny  # a variate of 0 would choose an excluded token
    return (probabilities / noise.clamp_min_(tiny)).argmax(-1)


def _generator(draw: Draw, device: torch.device) -> torch.Generator:
    """Return the generator of one token. A request that is read again repeats its draws."""
    answer = draw.request_id.rpartition(CHILD)[2] if CHILD in draw.request_id else ""
    text = f"{draw.sampling.seed} {draw.position} {answer}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator(device).manual_seed(seed)
