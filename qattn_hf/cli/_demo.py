"""Answers to the same prompts in full precision and through a packed cache, compared, for `qattn demo`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from qattn_hf.bench.model import kv_bytes
from qattn_hf.cli._prompts import Prompt, is_right
from qattn_hf.model._compat import CACHE
from qattn_hf.reading.metrics import divergence


@dataclass(frozen=True)
class Answer:
    """A generated continuation.

    Attributes:
        logits: fp32 `[tokens, vocabulary]`; row i are those from which token i was chosen.
        seconds: time of the whole `generate`.
        cache: the cache after it.
    """

    text: str
    tokens: list[int]
    logits: torch.Tensor
    seconds: float
    cache: Any


@dataclass(frozen=True)
class Comparison:
    """One prompt answered in full precision and through a packed cache.

    Attributes:
        agreement: share of full precision's tokens that the packed cache's own answer has at the same place.
        first_difference: index of the first other token; None when the answers are equal.
        kl: mean over the answer's tokens of KL(full precision || packed), both reading full precision's answer.
        same_top1: share of those tokens that the packed cache would choose too.
        answer_tokens, packed_answer_tokens: of full precision's answer, and of the packed cache's own.
        impl, decode: what computed the packed side (`triton`, `reference`), and its decode path.
    """

    prompt: Prompt
    prompt_tokens: int
    full_precision: str
    packed: str
    full_precision_right: bool | None
    packed_right: bool | None
    answer_tokens: int
    packed_answer_tokens: int
    agreement: float
    first_difference: int | None
    kl: float
    same_top1: float
    packed_tokens: int
    kv_bytes: int
    kv_bytes_full_precision: int
    effective_bits: float | None
    effective_bits_total: float
    tokens_per_second: float
    tokens_per_second_full_precision: float
    impl: str
    decode: str


class Progress(StoppingCriteria):
    """Stopping criterion that ends an answer at the prompt's `stop` text and advances the progress bar."""

    def __init__(self, tokenizer: Any, start: int, stop: str | None, advance: Callable[[], None]) -> None:
        self.tokenizer, self.start, self.stop, self.advance = tokenizer, start, stop, advance

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.advance()
        done = self.stop is not None and self.stop in self.tokenizer.decode(input_ids[0, self.start :])
        return torch.full((len(input_ids),), done, device=input_ids.device)


def answer(model: Any, tokenizer: Any, ids: torch.Tensor, prompt: Prompt, advance: Callable[[], None]) -> Answer:
    """Continue `ids` `[1, T]` greedily; `advance` is called for every token."""
    start = ids.shape[1]
    progress = Progress(tokenizer, start, prompt.stop, advance)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.max_new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([progress]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, start:].tolist()  # waits for the device
    seconds = time.perf_counter() - began
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    text = text.split(prompt.stop)[0] if prompt.stop else text
    return Answer(text.strip(), tokens, torch.cat(out.logits).float(), seconds, out[CACHE])


@torch.inference_mode()
def forced_logits(model: Any, ids: torch.Tensor, tokens: list[int], advance: Callable[[], None]) -> torch.Tensor:
    """Logits `[len(tokens), vocabulary]` for each of `tokens` after `ids`, fed one by one through the model's cache."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    rows = [out.logits[0, -1]]
    for token in tokens[:-1]:
        advance()
        step = torch.tensor([[token]], device=ids.device)
        out = model(step, use_cache=True, **{CACHE: out[CACHE]})
        rows.append(out.logits[0, -1])
    return torch.stack(rows).float()


def compare(prompt: Prompt, ids: torch.Tensor, full: Answer, packed: Answer, forced: torch.Tensor) -> Comparison:
    """Compare the two answers to a prompt.

    Args:
        ids: `[1, T]`, the prompt.
        forced: `[tokens, vocabulary]`, the packed cache's logits for full precision's answer.
    """
    from qattn_hf import report

    equal = [a == b for a, b in zip(full.tokens, packed.tokens, strict=False)]
    same = full.tokens == packed.tokens
    log_p, log_q = full.logits.double().log_softmax(-1), forced.double().log_softmax(-1)
    data = report(packed.cache).to_dict()
    return Comparison(
        prompt=prompt,
        prompt_tokens=ids.shape[1],
        full_precision=full.text,
        packed=packed.text,
        full_precision_right=is_right(prompt, full.text),
        packed_right=is_right(prompt, packed.text),
        answer_tokens=len(full.tokens),
        packed_answer_tokens=len(packed.tokens),
        agreement=sum(equal) / len(full.tokens),
        first_difference=None if same else (equal.index(False) if False in equal else len(equal)),
        kl=divergence(log_p, log_q).mean().item(),
        same_top1=(log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item(),
        packed_tokens=data["packed_tokens"],
        kv_bytes=data["kv_bytes"],
        kv_bytes_full_precision=kv_bytes(full.cache),
        effective_bits=data["effective_bits"],
        effective_bits_total=data["effective_bits_total"],
        tokens_per_second=len(packed.tokens) / packed.seconds,
        tokens_per_second_full_precision=len(full.tokens) / full.seconds,
        impl=data["impl"],
        decode=data["decode"],
    )
