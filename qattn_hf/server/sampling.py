"""How a request's next tokens are chosen: its own settings, and the checkpoint's where it has none."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from qattn_hf.server.schemas import Request

COLDEST = 0.01  # a temperature below it is 0: scores divided by much less leave the range of fp32
ALL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}  # every token, with the model's probabilities


def sampling_of(request: Request, config: GenerationConfig) -> dict[str, Any]:
    """Settings of one request by names of `generate`, all of them, so that nothing else has a default.

    The likeliest token is taken where `temperature` is 0, and where neither the request nor the checkpoint's `config`
    asks for a choice among several.
    """
    asked = {name: getattr(request, name) for name in ALL}
    given = {name: value for name, value in asked.items() if value is not None}
    sampled = bool(config.do_sample or given) if request.temperature is None else request.temperature >= COLDEST
    if not sampled:
        return {"do_sample": False}
    own = {name: getattr(config, name) for name in ALL} if config.do_sample else {}
    found = {**ALL, **{name: value for name, value in own.items() if value is not None}, **given}
    found |= {"do_sample": True, "seed": request.seed}
    return {name: value for name, value in found.items() if value is not None}
