"""lm-eval's Hugging Face model with a packed cache, patched on every rank."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import DynamicCache

from qattn_hf.cache.reporting import report
from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval.arguments import split_arguments
from qattn_hf.lm_eval.scoring import Text, packed_by_row, score
from qattn_hf.lm_eval.usage import Usage, held_by
from qattn_hf.messages.origin import versions
from qattn_hf.model._compat import CACHE
from qattn_hf.patching.patcher import patch, unpatch

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class QAttnLM(HFLM):
    """lm-eval's HFLM with generations and scores read through a packed cache.

    Args:
        pretrained: name or model, as HFLM takes it. A patched model keeps its recipe if none is named.
        method, recipe: as in `patch`. `method="full"`, or neither of them, means full precision through Transformers'
            stock cache in the same chunks.
        chunk: tokens of a call while a text is scored.
        kwargs: settings of the method, as in `patch`, and arguments of HFLM.
    """

    def __init__(self, pretrained: Any, **kwargs: Any):
        named = bool({"method", "recipe"} & set(kwargs))
        self.recipe, self.chunk, rest = split_arguments(kwargs, HFLM)
        rest.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, **rest)
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None:  # HFLM leaves ranks unset if a process sees one GPU or none
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if self.backend != "causal":
            raise QAttnError("a packed cache serves decoders; this model is an encoder-decoder: use --model hf")
        if self.recipe is not None:
            self.recipe = patch(self.model, recipe=self.recipe)._qattn.recipe
        elif hasattr(self.model, "_qattn"):
            if named:  # full precision was requested
                unpatch(self.model)
            else:
                self.recipe = self.model._qattn.recipe
        self.usages: dict[str, Usage] = {}
        self.usage = Usage()
        self._task_of: dict[str, str] = {}  # by context
        self._tasks: list[str] = []  # of the rows of a batch
        log.info("qattn: %s", self.mode)

    @property
    def packs(self) -> bool:
        """Whether keys and values are packed."""
        return self.recipe is not None and self.recipe.settings.packs()

    @property
    def mode(self) -> str:
        """Sentence that says how scores were read, to be recorded with them."""
        through = "through the packed cache"
        if not self.packs:
            through = "through transformers' own cache, nothing packed"
        return f"{through}: texts in chunks of {self.chunk} tokens, generations token by token"

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations, as HFLM does, task by task, read through the cache.

        Raises:
            QAttnError: no scored token of a task read packed tokens, so the score would be full precision's.
        """
        return self._by_task(requests, lambda part: super(QAttnLM, self).loglikelihood(part, disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of texts, as HFLM does: disjoint windows of `max_length` tokens, one cache each.

        Raises:
            QAttnError: no scored token of a task read packed tokens, so the score would be full precision's.
        """
        return self._by_task(requests, lambda part: self._rolling(part, disable_tqdm))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, as HFLM does. Each batch is one `generate` with a new cache, and may mix tasks."""
        self._task_of = {request.args[0]: request.task_name or "" for request in requests}
        return super().generate_until(requests, disable_tqdm)

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode contexts of a batch, as HFLM does, and note their tasks for `_model_generate`."""
        self._tasks = [self._task_of.get(text, "") for text in strings]
        return super().tok_batch_encode(strings, *args, **kwargs)

    def get_model_info(self) -> dict[str, Any]:
        """Return HFLM's information, and under `qattn` the mode, recipe, implementation, versions and usage by task.

        Usage is counted only in this process, the first of `world_size`.
        """
        info: dict[str, Any] = {
            "mode": self.mode,
            "method": None if self.recipe is None else self.recipe.method,
            "recipe": None if self.recipe is None else self.recipe.settings.model_dump(),
            "recipe_origin": None if self.recipe is None else self.recipe.origin,
            "impl": None if self.recipe is None or not self.packs else report(self.model).impl,
            "chunk": self.chunk,
            "versions": {**versions(), "lm_eval": importlib.metadata.version("lm_eval")},
            "world_size": self.world_size,
            "tasks": {name: usage.to_dict() for name, usage in self.usages.items()},
        }
        return {**super().get_model_info(), "qattn": info}

    def _by_task(self, requests: list[Any], run: Callable[[list[Any]], list[Answer]]) -> list[Answer]:
        """Run each task's requests separately, to count its usage. Returns answers in the order of `requests`."""
        places: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            places.setdefault(request.task_name or "", []).append(i)
        answers: dict[int, Answer] = {}
        for task, at in places.items():
            self.usage = self.usages.setdefault(task, Usage())
            answers.update(zip(at, run([requests[i] for i in at]), strict=True))
        return [answers[i] for i in range(len(requests))]

    def _rolling(self, requests: list[Any], disable_tqdm: bool) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            cut = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(window)) for window in cut]
            counts.append(len(windows))
        scores = [value for value, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        totals = [sum(scores[a:b]) for a, b in zip([0, *counts], counts, strict=False)]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _tokens_read(self, i: int, name: Any, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """Return the tokens that the model reads to score request `i`, cut on the left to `max_length`."""
        if len(continuation) > self.max_length:
            said = "" if name is None else f" {name[1][:40]!r}..."
            raise QAttnError(
                f"request {i}: the continuation{said} has {len(continuation)} tokens, and max_length={self.max_length} "
                "leaves no room for all of them: raise max_length in model_args, or leave the request out (--limit, "
                "--samples)"
            )
        text = context + continuation
        if len(text) > self.max_length + 1:
            log.warning("a text of %d tokens is cut on the left to %d", len(text), self.max_length + 1)
        return tuple(text[-(self.max_length + 1) : -1])

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score (name, context, continuation) triples. Those that differ only in their last token share a row."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            shared.setdefault(self._tokens_read(i, *request), []).append(i)
        texts = {tokens: Text(tokens, [requests[i][2] for i in at]) for tokens, at in shared.items()}
        longest_first = sorted(texts.values(), key=lambda text: -len(text.tokens))
        size = override_bs or self.batch_size
        if size == "auto":
            size = self._detect_batch_size([requests[shared[longest_first[0].tokens][0]]])
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood") as bar:
            for batch in _batches(longest_first, size):
                for text, scores in zip(batch, self._score(batch), strict=True):
                    answers.update(zip(shared[text.tokens], scores, strict=True))
                    bar.update(len(scores))
        for i, (name, _, _) in enumerate(requests):
            if name is not None:  # windows of a rolling text have no name
                self.cache_hook.add_partial("loglikelihood", name, answers[i])
        return [answers[i] for i in range(len(requests))]

    def _score(self, texts: list[Text]) -> Iterator[list[tuple[float, bool]]]:
        began = time.perf_counter()
        with self._autocast():
            rows, cache = score(self.model, texts, self.chunk, self.tokenizer.pad_token_id or 0, self.softmax_dtype)
        usage = self.usage
        usage.seconds += time.perf_counter() - began
        usage.add_held(held_by(cache))
        usage.requests += len(texts)
        usage.tokens += sum(len(text.tokens) for text in texts)
        usage.scored += sum(text.scored for text in texts)
        usage.packed_requests += sum(row.through_packed > 0 for row in rows)
        usage.scored_through_packed += sum(row.through_packed for row in rows)
        if self.packs and not usage.scored_through_packed:  # shorter texts follow and pack nothing either
            self._refuse_unpacked(texts)
        return (row.answers for row in rows)

    def _refuse_unpacked(self, texts: list[Text]) -> None:
        patched = self.model._qattn
        least = max(spec.window.span + spec.window.residual for spec in patched.packed)
        longest = max(len(text.tokens) for text in texts)
        raise QAttnError(
            "nothing was packed while the texts of this task were scored, so the score would be that of full "
            f"precision: the longest text has {longest} tokens. A block of {patched.recipe.method} closes after {least}"
            f", and the next chunk (of {self.chunk}) reads it. Use longer contexts (--num_fewshot), a smaller chunk, "
            "or a smaller block or residual. To score full precision set method=full"
        )

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        stock_cache = None
        if not self.packs:  # the cache that `generate` would make, so that its bytes can be counted
            stock_cache = kwargs[CACHE] = DynamicCache(config=self.model.config)
        real = kwargs["attention_mask"].sum(1).tolist()
        began = time.perf_counter()
        out = super()._model_generate(context, max_length, stop, **kwargs)
        written = (out[:, context.shape[1] :] != self.tokenizer.pad_token_id).sum(1).tolist()
        seconds = time.perf_counter() - began
        cache = stock_cache if stock_cache is not None else self.model._qattn.last.cache
        held = held_by(cache)
        packed = packed_by_row(cache) or [0] * len(context)
        for task in dict.fromkeys(self._tasks):
            self.usages.setdefault(task, Usage()).add_held(held)
        for task, tokens, generated, kept in zip(self._tasks, real, written, packed, strict=True):
            self.usages[task].add_generated(tokens, generated, kept, seconds / len(context))
        return out

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


def _batches(texts: list[Text], size: int) -> Iterator[list[Text]]:
    """Yield batches of either short or long texts. The batch with the longest text comes first."""
    kinds = [[text for text in texts if text.short == short] for short in (texts[0].short, not texts[0].short)]
    for kind in kinds:
        yield from (kind[i : i + size] for i in range(0, len(kind), size))
