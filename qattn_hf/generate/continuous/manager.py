"""Transformers' manager of continuous batching for a patched model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.generate.continuous.admission import (
    EngineError,
    Limits,
    RequestError,
    positions_of,
    sampling_of,
    stop_tokens,
)
from qattn_hf.generate.continuous.cache import PagedCache
from qattn_hf.generate.continuous.model_pages import pages_of_model
from qattn_hf.generate.continuous.pool import PoolSize, size_of
from qattn_hf.generate.continuous.processor import SCHEDULERS, PackedProcessor
from qattn_hf.generate.continuous.resolve import resolved
from qattn_hf.generate.continuous.router import Router
from qattn_hf.generate.continuous.sampling import CHILD, Sampling, taken
from qattn_hf.generate.continuous.transformers_api import (
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingManager,
    RequestState,
    check_version,
)
from qattn_hf.generate.patched import patch_of
from qattn_hf.messages import shown
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.with_names import with_names
from qattn_hf.saved.weights import seem_unchanged, trained, weights_of

QUEUE_SECONDS = 10  # longest wait for a queue bounded by `max_queue_size`, as in Transformers


class PackedBatchingManager(ContinuousBatchingManager):
    """A `ContinuousBatchingManager` with a pool of packed pages. A failing request does not end others.

    Attributes:
        pool: size of the pool; None until `prepare`, `start` or the first request allocates it.
        limits: limits of a request from the pool and the model; None until the pool is allocated.
    """

    batch_processor: Any
    logit_processor: Any

    def __init__(self, model: PreTrainedModel, generation_config: GenerationConfig, **kwargs: Any):
        for name, value in (("stop_strings", None), ("num_beams", 1)):
            if getattr(generation_config, name, None) not in (None, value):
                raise UnsupportedError(
                    f"{name}={getattr(generation_config, name)!r}: continuous batching has no {name}; leave it out, or "
                    "call generate"
                )
        self.pages = pages_of_model(model)
        self.weights = weights_of(decoder_of(model))
        self.pool: PoolSize | None = None
        self.limits: Limits | None = None
        self._making, self._admitting, self._open = threading.Lock(), threading.Lock(), True
        with_names(
            ContinuousBatchingManager.__init__,
            resolve_continuous_batching_config=partial(resolved, self.pages),
            OutputRouter=lambda: Router(self.cancel_request),
        )(self, model=model, generation_config=generation_config, **kwargs)
        self.sampling, rest = taken(self.logit_processor.logits_processor, bool(generation_config.do_sample))
        self.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList(rest))
        self.logit_processor.supported_keys["sampling"] = Sampling

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: the attention that `patch` selected also serves these calls."""

    def _create_batch_processor(self) -> Any:
        slots = self.continuous_batching_config.max_requests_per_batch
        create = with_names(
            ContinuousBatchingManager._create_batch_processor,
            PagedAttentionCache=partial(PagedCache, self.pages, patch_of(self.model).constants, slots),
            ContinuousBatchProcessor=PackedProcessor,
            SCHEDULER_MAPPING=SCHEDULERS,
        )
        if self.batch_processor is not None:
            return create(self)
        try:
            made = create(self)
        except QAttnError:
            raise
        except (MemoryError, ValueError, RuntimeError) as error:
            raise QAttnError(
                f"the pool of continuous batching could not be made: {error}. Ask for fewer blocks (num_blocks of "
                "ContinuousBatchingConfig, `qattn serve --blocks`) or fewer max_batch_tokens"
            ) from error
        patch_of(self.model).last.pages = made.cache.figures
        self.pool = size_of(made.cache.figures)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.limits = Limits(vocabulary, self.pool.tokens, positions_of(self.model.config))
        return made

    def prepare(self) -> PoolSize:
        """Allocate the pool, unless it exists.

        Raises:
            QAttnError: the pool does not fit the memory.
        """
        with self._making:
            if self.batch_processor is None:
                self.batch_processor = self._create_batch_processor()
        assert self.pool is not None
        return self.pool

    def start(self) -> None:
        """Start the loop. A loop that `failed` starts again with an empty pool.

        Raises:
            QAttnError: the pool does not fit the memory.
            RuntimeError: the device has failed.
        """
        if self.failed is not None and self._generation_thread is not None:
            self._generation_thread.join()  # the loop reports its error before its thread ends
        if not self.is_running():
            if self.failed is not None and self.batch_processor is not None:
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize(self.model.device)
                self.batch_processor.cache.reset()
            self.prepare()
            self._open = True
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the loop, and count for the report what its pages hold."""
        processor = self.batch_processor
        super().stop(*args, **kwargs)
        if processor is not None and self.failed is None and not self.is_running():
            processor.cache.count_clamped()

    def join(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the end of the loop. Without being woken, an idle loop looks for requests every 0.1 s."""
        self._wake_up_loop.set()
        super().join(*args, **kwargs)

    @property
    def failed(self) -> BaseException | None:
        """The error that ended the loop; None while it runs and after `stop`."""
        error: BaseException | None = self.background_thread_status.fatal_error
        return error

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its answer together. Allocates the pool, unless it exists."""
        return self._limits().longest

    def room(self, prompt_tokens: int) -> int:
        """Return the number of new tokens that a prompt of `prompt_tokens` may ask for. Allocates the pool, unless it
        exists."""
        return self.longest - prompt_tokens

    def _limits(self) -> Limits:
        if self.limits is None:
            self.prepare()
        assert self.limits is not None
        return self.limits

    def metrics(self) -> dict[str, int]:
        """Return the pool's use and the counts of requests. Safe to call from any thread.

        Returns:
            `blocks`, `block_tokens` and `bytes` of the pool; `blocks_used`; `blocks_cached`, kept from ended requests
            for shared prefixes; `bytes_packed`, the bytes in use; `requests_running`, `requests_waiting`,
            `requests_finished`, `requests_failed`, `requests_cancelled`; `forwards_failed`. Before the pool exists,
            only the counts of ended requests.
        """
        processor, counts = self.batch_processor, self.output_router.counts
        ended = {name: counts[name] for name in ("requests_finished", "requests_failed", "requests_cancelled")}
        if processor is None or self.pool is None:
            return ended
        scheduler = processor.scheduler
        return {
            "blocks": self.pool.blocks,
            "block_tokens": self.pool.block_tokens,
            "bytes": self.pool.bytes,
            **processor.cache.held_now(),
            "requests_running": len(scheduler.active_requests),
            "requests_waiting": len(scheduler.waiting_requests) + self.input_queue.qsize(),
            **ended,
            "forwards_failed": processor.failures,
        }

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **settings: Any,
    ) -> str:
        """Queue a request.

        Args:
            input_ids: token ids of the prompt.
            request_id: id of the request; None makes one.
            max_new_tokens: None means the generation config's value, or all the room if the config has none.
            settings: fields of `Sampling` for this request; None means the generation config's value.

        Returns:
            the request's id.

        Raises:
            RequestError: the request cannot be served. Other requests are not affected.
            EngineError: the loop has ended or is ending, or the queue is full.
            QAttnError: the pool, which the first request allocates, does not fit the memory.
        """
        self._check_open()
        request_id = self._new_id() if request_id is None else request_id
        state = self._state(input_ids, request_id, max_new_tokens, eos_token_id, settings, streaming, record_timestamps)
        self._queue(state)
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **settings: Any,
    ) -> list[str]:
        """Queue requests like `add_request`. A request that cannot be served gets an output with an error.

        Returns:
            their ids, in the order of `inputs`.
        """
        eos = self.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        ids, states, refused = [self._new_id() for _ in inputs], [], {}
        for request_id, given in zip(ids, inputs, strict=True):
            try:
                states.append(
                    self._state(given, request_id, max_new_tokens, eos, settings, streaming, record_timestamps)
                )
            except RequestError as error:
                refused[request_id] = str(error)
        if self._use_prefix_sharing:  # a prompt that begins with another prompt's blocks must come after it
            states.sort(key=lambda state: state.initial_tokens, reverse=True)
        for state in states:
            try:
                self._queue(state)
            except QAttnError as error:
                refused[state.request_id] = str(error)
        for request_id, text in refused.items():
            answers = self._answers(request_id)
            self.output_router.begin(answers)
            self.output_router.fail(answers, text)
        return ids

    def cancel_request(self, request_id: str) -> None:
        """End a request at any time. An unknown id is ignored.

        Raises:
            RequestError: the id is not a string.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"a request id is a text, this is {shown(request_id)}")
        super().cancel_request(request_id)

    def drop_result_handler(self, request_id: str) -> None:
        """Forget a handler of `register_result_handler`, for example the handler of a refused request."""
        self.output_router.drop_handler(request_id)

    def _new_id(self) -> str:
        with self._request_lock:
            while f"req_{self._request_counter}" in self.output_router.live:
                self._request_counter += 1
            self._request_counter += 1
            return f"req_{self._request_counter - 1}"

    def _answers(self, request_id: str) -> list[str]:
        return [request_id, *(f"{request_id}{CHILD}{index}" for index in range(self.num_return_sequences - 1))]

    def _state(
        self,
        input_ids: Any,
        request_id: str,
        max_new_tokens: int | None,
        eos: Any,
        settings: dict[str, Any],
        streaming: bool,
        record_timestamps: bool,
    ) -> Any:
        """Check a request and return Transformers' state for it."""
        if not isinstance(request_id, str) or CHILD in request_id:
            raise RequestError(f"a request id is a text without {CHILD!r}, this is {shown(request_id)}")
        limits = self._limits()
        ids = limits.ids(input_ids)
        config = self.generation_config
        return RequestState(
            request_id=request_id,
            initial_tokens=ids,
            num_children=self.num_return_sequences - 1,
            record_timestamps=bool(record_timestamps),
            max_new_tokens=limits.new_tokens(
                len(ids), config.max_new_tokens if max_new_tokens is None else max_new_tokens
            ),
            eos_token_id=stop_tokens(config.eos_token_id if eos is None else eos),
            streaming=bool(streaming),
            logit_processor_kwargs={"sampling": sampling_of(self.sampling, settings)},
        )

    def _queue(self, state: Any) -> None:
        answers = self._answers(state.request_id)
        with self._admitting:
            self._check_open()
            self.output_router.begin(answers)
            try:
                self.input_queue.put(state, block=True, timeout=QUEUE_SECONDS)
            except queue.Full:
                self.output_router.forget(answers)
                raise EngineError("too many requests are waiting: send this one again later") from None
        self._wake_up_loop.set()

    def _check_open(self) -> None:
        if not seem_unchanged(decoder_of(self.model), self.weights):
            raise EngineError(
                "the model's weights were trained after this manager was made, and its pages may hold prefixes of "
                "earlier weights: call model.init_continuous_batching() for a new one"
            )
        reason = self.background_thread_status.can_accept_new_requests()
        if reason is not None or not self._open:
            raise EngineError(f"no request is accepted: {reason or 'the loop has ended.'} Start the manager again")

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        try:
            return bool(super()._generation_loop_body(batch_processor, bootstrapping))
        except Exception as error:
            batch_processor.recover(error)
            return True
        except BaseException as error:  # Transformers' loop would end on it silently
            raise EngineError(f"{type(error).__name__} ended the loop of continuous batching") from error

    def _fail_all_remaining_requests(self, error: Exception, batch_processor: Any) -> None:
        with self._admitting:  # requests queued from here on would never be served
            self._open = False
        ended = EngineError(f"continuous batching ended before this request did: {type(error).__name__}: {error}")
        super()._fail_all_remaining_requests(ended, batch_processor)
        self.output_router.fail(sorted(self.output_router.live), str(ended))


def init_continuous_batching(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Override of `init_continuous_batching`, which `generate_batch` and `transformers serve` call.

    A persistent manager is replaced if the weights have changed.

    Raises:
        UnsupportedError: Transformers is too old, or packed pages do not support the model, its recipe or a setting of
            the `ContinuousBatchingConfig`.
    """
    check_version()
    cached = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(cached, PackedBatchingManager) and trained(cached.weights, weights_of(decoder_of(model))):
        model.destroy_cached_continuous_batching_manager()
    made = with_names(type(model).init_continuous_batching, ContinuousBatchingManager=PackedBatchingManager)
    return made(model, *args, **kwargs)
