"""Requests served in turn, by `generate`."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from qattn_hf.cache.reporting import report
from qattn_hf.errors import QAttnError
from qattn_hf.generate.continuous.admission import Limits, positions_of
from qattn_hf.server.engine import Engine, Stream
from qattn_hf.server.refusals import Refused

logger = logging.getLogger(__name__)
CLOSING = 2.0  # seconds that a worker has for the end of its step
UNKNOWN = 2**20  # tokens of a request where the model's config names no number of positions


class OneByOne(Engine):
    """The worker is a thread that calls `generate` for one request after the other.

    Args:
        model: patched. tokenizer: of the model. eos: ids that end an answer.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, eos: list[int]):
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self._config: GenerationConfig = GenerationConfig.from_dict(model.generation_config.to_dict())
        pad = self._config.pad_token_id
        self._config.update(
            num_return_sequences=1,
            num_beams=1,
            max_length=None,
            use_cache=True,  # trained checkpoints often say False
            eos_token_id=eos or None,
            pad_token_id=pad if pad is not None else (eos or [0])[0],
        )
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self.limits = Limits(vocabulary, UNKNOWN, positions_of(model.config))
        self._waiting: queue.Queue[Stream | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="qattn-generate", daemon=True)
        self._error: BaseException | None = None

    def start(self) -> str:
        self._thread.start()
        return f"no pool: one request after the other, of {self.limits.longest} tokens each"

    def stop(self) -> bool:
        for stream in list(self.running.values()):
            stream.cancelled = True
        self._waiting.put(None)
        self._thread.join(CLOSING)
        return not self._thread.is_alive()

    def died(self) -> BaseException | None:
        return self._error

    def restart(self) -> None:
        _check_device()
        self._error, self._waiting = None, queue.Queue()
        self._thread = threading.Thread(target=self._run, name="qattn-generate", daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, int]:
        waiting = min(self._waiting.qsize(), len(self.running))
        return {"requests_running": len(self.running) - waiting, "requests_waiting": waiting}

    def _submit(self, stream: Stream) -> None:
        self._waiting.put(stream)

    def _cancel(self, stream: Stream) -> None:
        """Nothing: the worker reads `stream.cancelled` at each token."""

    def _run(self) -> None:
        try:
            while (stream := self._waiting.get()) is not None:
                try:
                    if not stream.cancelled:
                        self._answer(stream)
                except Exception as error:
                    stream.push_from_worker(_refusal(error))
                    _check_device()
                else:
                    stream.push_from_worker(None)
        except BaseException as error:
            self._error = error

    def _answer(self, stream: Stream) -> None:
        """Generate the answer of one request."""
        settings = dict(stream.sampling)
        seed = settings.pop("seed", None)
        torch.manual_seed(seed) if seed is not None else torch.seed()
        config: GenerationConfig = GenerationConfig.from_dict(self._config.to_dict())
        config.update(max_new_tokens=stream.new, **settings)
        if not settings["do_sample"]:
            config.update(temperature=1.0, top_p=1.0, top_k=50, min_p=None)  # else each of them is warned of
        ids = torch.tensor([stream.ids], device=self._model.device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=_Tokens(stream),
            stopping_criteria=StoppingCriteriaList([_Cancelled(stream)]),
            tokenizer=self._tokenizer,  # reads the checkpoint's stop strings
        )
        stream.bits = report(self._model).to_dict()["effective_bits"]


def _refusal(error: Exception) -> Refused:
    """What a request is told whose `generate` failed with this error."""
    if isinstance(error, QAttnError):
        return Refused(str(error), code="not_served")
    logger.error("a request failed", exc_info=error)
    return Refused(f"the request failed: {type(error).__name__}: {error}", status=500, code="request_failed")


def _check_device() -> None:
    """Raise the error of a GPU that is lost: no later request would be answered."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _Tokens(BaseStreamer):
    """Hands the tokens of `generate` to a stream; the first ones are the prompt's."""

    def __init__(self, stream: Stream):
        self._stream, self._prompt = stream, True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self._stream.push_from_worker(value.tolist())
        self._prompt = False

    def end(self) -> None:
        """Nothing: the worker ends the stream."""


class _Cancelled(StoppingCriteria):
    """Ends `generate` where nobody reads its stream any more."""

    def __init__(self, stream: Stream):
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stream.cancelled, device=input_ids.device)
