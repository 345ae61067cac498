"""Prompts of the demo: sums, lists to recall, prose. The embedded model was trained on sums and lists like these."""

from __future__ import annotations

import random
from dataclasses import dataclass

from qattn_hf.assets import demo_tasks

PROSE = """\
The road to the mill ran along the river, and in the spring, when the water was high, a man who walked there in the \
evening could hear nothing but the weir. Old Martin had walked it every day for forty years. He knew each of the \
willows, and the place where the bank had fallen in, and the gate that would not shut unless it was lifted with the \
shoulder. On the night of which I speak he had a letter in the pocket of his coat. It had come in the morning, with a \
foreign stamp upon it, and he had carried it about with him all the day and had not opened it.

"There is time enough," he had said to his daughter, who looked at him across the table and did not answer. "A letter \
does not grow old like bread."

But when he came to the gate he stopped, and set down his lantern upon the post, and took the letter out. The hand was \
one that he knew, though he had not seen it for eleven years. He turned it over twice. Then a light moved upon the \
other side of the water, where no house had stood since the fire, and he heard the voice of a man who"""


@dataclass(frozen=True)
class Prompt:
    """A text to continue: up to `max_new_tokens`, or until `stop` is written. `gold` is the right answer, if any."""

    name: str
    text: str
    max_new_tokens: int
    stop: str | None = None
    gold: str | None = None


def demo_prompts(seed: int = 0) -> list[Prompt]:
    """Five prompts of a few hundred tokens, so that most of each is packed; equal seeds give equal prompts."""
    rng = random.Random(seed)
    prompts = []
    for number in (1, 2):
        text, answer = demo_tasks.few_shot(rng, shots=8)
        gold = demo_tasks.final_number(answer)
        prompts.append(Prompt(f"sum {number}", text, 96, stop="\n\n", gold=gold))
    for number in (1, 2):
        text, gold = demo_tasks.recall(rng, n=10)
        prompts.append(Prompt(f"recall {number}", text, 8, stop="\n", gold=gold))
    return [*prompts, Prompt("prose", PROSE, 64)]


def is_right(prompt: Prompt, answer: str) -> bool | None:
    """Whether an answer gives the prompt's `gold`; None when there is no right answer."""
    if prompt.gold is None:
        return None
    result = demo_tasks.final_number(answer) if "####" in answer else answer.strip().removesuffix(".")
    return result == prompt.gold
