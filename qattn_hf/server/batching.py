"""Requests served together, by continuous batching over one pool of packed pages."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from qattn_hf.errors import QAttnError
from qattn_hf.generate.continuous.admission import EngineError, RequestError
from qattn_hf.generate.continuous.page_layout import page_bytes
from qattn_hf.messages import size
from qattn_hf.server.engine import Engine, Stream
from qattn_hf.server.refusals import Refused

BLOCK = 256  # tokens of a block of `--blocks`
CLOSING = 2.0  # seconds that a worker has for the end of its step
# settings of a checkpoint that continuous batching does not have, with the values that change nothing
LEFT_OUT = {
    "repetition_penalty": (None, 1),
    "guidance_scale": (None, 1),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}


class Batching(Engine):
    """The worker is the thread of transformers' continuous batching, with pages of a patched model.

    Args:
        model: patched. blocks: of `BLOCK` tokens in the pool; None: what fits. batch_tokens: of a forward.
        eos: ids that end an answer.
    """

    def __init__(self, model: PreTrainedModel, blocks: int | None, batch_tokens: int | None, eos: list[int]):
        super().__init__()
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        given = {"num_blocks": blocks, "max_batch_tokens": batch_tokens}
        settings = {name: value for name, value in given.items() if value is not None}
        config: GenerationConfig = GenerationConfig.from_dict(model.generation_config.to_dict())
        left = {name: value for name, neutral in LEFT_OUT.items() if (value := getattr(config, name)) not in neutral}
        config.update(num_return_sequences=1, num_beams=1, stop_strings=None, **dict.fromkeys(left))
        self._eos = eos or [-1]
        names = ", ".join(f"{name}={value}" for name, value in left.items())
        self._left_out = f"; left out of the checkpoint's settings: {names}" if left else ""
        self._manager: Any = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(page_size=BLOCK, **settings),
        )
        self._bits = 0.0

    def start(self) -> str:
        pool = self._manager.prepare()
        self.limits = self._manager.limits
        self._bits = _bits(self._manager)
        self._manager.start()
        return (
            f"pool: {pool.tokens} tokens in {size(pool.bytes)} ({pool.bytes / 2**30:.2f} GiB), {self._bits:.2f} bits a "
            f"value; at most {pool.requests} requests at once, of {self.limits.longest} tokens each{self._left_out}"
        )

    def stop(self) -> bool:
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=CLOSING, hard_stop=True)
        return not self._manager.is_running()

    def died(self) -> BaseException | None:
        failed: BaseException | None = self._manager.failed
        return failed

    def restart(self) -> None:
        self._manager.start()

    def figures(self) -> dict[str, int]:
        found: dict[str, int] = self._manager.metrics()
        return found

    def _submit(self, stream: Stream) -> None:
        sent = 0

        def take(output: Any) -> None:
            """The request's tokens so far, on the event loop."""
            nonlocal sent
            new = output.generated_tokens[sent:]
            sent += len(new)
            if output.error is not None:
                stream.push(Refused(f"the request failed: {output.error}", status=500, code="request_failed"))
            elif new:
                stream.push(new)
            if output.error is None and output.is_finished():
                stream.push(None)

        stream.bits = self._bits
        self._manager.register_result_handler(stream.name, take)
        try:
            self._manager.add_request(
                stream.ids,
                request_id=stream.name,
                max_new_tokens=stream.new,
                streaming=True,
                eos_token_id=self._eos,
                **stream.sampling,
            )
        except QAttnError as error:
            self._manager.drop_result_handler(stream.name)
            status = 503 if isinstance(error, EngineError) else 400
            code = "invalid_request" if isinstance(error, RequestError) else None
            raise Refused(str(error), status=status, code=code) from error

    def _cancel(self, stream: Stream) -> None:
        self._manager.cancel_request(stream.name)


def _bits(manager: Any) -> float:
    """Bits of a value in the pool's blocks."""
    layouts = manager.pages.pooled or manager.pages.every
    shapes = [layout.geometry for layout in layouts]
    values = sum(shape.heads * (shape.k_dim + shape.v_dim) for shape in shapes)
    return 8 * sum(map(page_bytes, layouts)) / (manager.pages.block * values)
