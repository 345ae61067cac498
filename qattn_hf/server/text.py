"""Prompts as token ids, and tokens of an answer as text that is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qattn_hf.server.refusals import Refused

# for models without a chat template: a line a message, and the answer ends where the next line of the user would begin
PLAIN = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
PLAIN_STOP = "\nuser:"
# arguments of `apply_chat_template` that are no variables of a template
OWN = {"tokenize", "add_generation_prompt", "chat_template", "conversation", "continue_final_message", "tools"}
OWN |= {"documents", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
OWN |= {"return_assistant_tokens_mask"}
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes of a character that is not whole yet


def chat_text(tokenizer: Any, messages: Sequence[dict[str, str]], template: str | None, options: dict[str, Any]) -> str:
    """The prompt of a chat.

    Args:
        template: in place of the tokenizer's own. options: more variables of the template.

    Raises:
        Refused: the template refuses the messages.
    """
    if taken := OWN & set(options):
        name = min(taken)
        raise Refused(
            f"chat_template_kwargs: the server sets {name} itself: leave it out", param="chat_template_kwargs"
        )
    try:
        found: str = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False, **options
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise Refused(
            f"the model's chat template refuses these messages: {error}", param="messages", code="chat_template"
        ) from error
    return found


def token_ids(tokenizer: Any, text: str, special: bool, param: str) -> list[int]:
    """Ids of a text.

    Args:
        special: whether to put the tokens around it that the model expects of a text.

    Raises:
        Refused: no text, or one that is not Unicode.
    """
    if not text:
        raise Refused("the prompt is empty: send at least one token", param=param, code="empty_prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            f"the text has half of a surrogate pair at character {error.start}: send whole characters", param=param
        ) from None
    found: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return found


class Text:
    """The text of one answer, as far as no later token can change it.

    Args:
        tokenizer: of the model. stops: texts that end the answer and are no part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._begin = self._read = 0  # ids from `_begin` on are decoded; the text of those before `_read` is known
        self._held = ""  # what may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that this token makes certain; sets `stopped` where a stop string is whole."""
        self._ids.append(token)
        whole = self._decoded(self._begin, len(self._ids))
        if whole.endswith(UNFINISHED):
            return ""
        return self._released(self._advanced(whole), final=False)

    def end(self) -> str:
        """The text that is held back, after the last token."""
        if self.stopped:
            return ""
        return self._released(self._advanced(self._decoded(self._begin, len(self._ids))), final=True)

    def _decoded(self, begin: int, end: int) -> str:
        found: str = self._tokenizer.decode(self._ids[begin:end], skip_special_tokens=True)
        return found

    def _advanced(self, whole: str) -> str:
        """What `whole`, the text of the ids from `_begin` on, has that is new. The last ids stay, since decoders look
        at the token before, as for a space."""
        new = whole[len(self._decoded(self._begin, self._read)) :]
        self._begin, self._read = self._read, len(self._ids)
        return new

    def _released(self, new: str, final: bool) -> str:
        text = self._held + new
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that a stop string begins with, shorter than the string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
