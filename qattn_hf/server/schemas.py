"""Bodies of requests: the fields that are served, and what is said of those that are not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from qattn_hf.messages import shown
from qattn_hf.server.refusals import Refused

StopString = Annotated[str, Field(min_length=1, max_length=1000)]

# fields of OpenAI's API that are not served: the values that ask for nothing, and what to do instead
ONE_ANSWER = "one request has one answer: send the request several times"
NO_LOGPROBS = "the server keeps no probabilities: call the model in Python, or `qattn eval`"
NO_TOOLS = "the server passes no tools to the chat template: describe them in a message"
NO_EFFORT = "the model has no such setting: leave it out, or pass chat_template_kwargs that its template knows"
TEXT_ALONE = "the server reads and writes only text: leave it out"
NO_PENALTY = "the server has no penalties for single requests: leave it out"
NOT_HERE = "the server has no such service: leave it out"
NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), ONE_ANSWER),
    "best_of": ((1,), ONE_ANSWER),
    "logprobs": ((False,), NO_LOGPROBS),
    "top_logprobs": ((0,), NO_LOGPROBS),
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "parallel_tool_calls": ((True, False), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "response_format": (({"type": "text"},), "answers are free text: ask for the format in a message"),
    "modalities": ((["text"],), TEXT_ALONE),
    "audio": ((), TEXT_ALONE),
    "prediction": ((), "drafts of an answer are not read: leave it out"),
    "web_search_options": ((), NOT_HERE),
    "reasoning_effort": ((), NO_EFFORT),
    "verbosity": ((), NO_EFFORT),
    "service_tier": (("auto", "default"), NOT_HERE),
    "store": ((False,), NOT_HERE),
    "presence_penalty": ((0, 0.0), NO_PENALTY),
    "frequency_penalty": ((0, 0.0), NO_PENALTY),
    "repetition_penalty": ((1, 1.0), NO_PENALTY),
    "logit_bias": (({},), "scores of single tokens are not changed: leave it out"),
    "echo": ((False,), "the answer has only new text: put the prompt before it yourself"),
    "suffix": (("",), "the server writes text only after a prompt: leave it out"),
}

IN_ANSWERS = ("refusal", "annotations", "audio", "function_call", "tool_calls")  # fields of a message in an answer


class Body(BaseModel):
    """Checks of every request body: known fields, exact types, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat. Fields of `IN_ANSWERS` may be there, but must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def leave_out_empty_fields(cls, given: Any) -> Any:
        """Leave out what OpenAI's clients add to an answer that they send back."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in IN_ANSWERS or value not in (None, [])}

    def plain(self) -> dict[str, str]:
        """The message as chat templates read it: the parts of its content as lines of one text."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        # OpenAI's newer name of the system's role, which few templates know
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Request(Body):
    """Fields that both kinds of requests have. None is the default everywhere."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # names that a client gives for its own account
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def refuse_what_is_not_served(cls, given: Any) -> Any:
        """Leave out fields of `NOT_SERVED` that ask for nothing, and refuse the others."""
        if not isinstance(given, dict):
            return given
        for name, (allowed, words) in NOT_SERVED.items():
            value = given.get(name)
            same = [True for other in allowed if type(other) is type(value) and other == value]
            if value is not None and not same:
                raise Refused(f"{name}={shown(value)} is not served, since {words}", param=name, code="not_served")
        return {name: value for name, value in given.items() if name not in NOT_SERVED}

    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def wants_usage(self) -> bool:
        """Whether a last chunk of the stream has token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Request):
    """A body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None

    def new_tokens(self) -> int | None:
        """Return the most tokens of the answer; None if only the room limits them."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Request):
    """A body of `/v1/completions`. A list of one prompt is the prompt."""

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def one_prompt(cls, given: Any) -> Any:
        """A text or ids, of a list of one as well."""
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
            given = given[0]
        if isinstance(given, str) or (isinstance(given, list) and all(type(one) is int for one in given)):
            return given
        raise Refused(
            "the prompt is neither one text nor the token ids of one: send one prompt a request",
            param="prompt",
            code="invalid_value",
        )

    def new_tokens(self) -> int | None:
        """The most tokens of the answer; 16 by default, as OpenAI's."""
        return 16 if self.max_tokens is None else self.max_tokens
