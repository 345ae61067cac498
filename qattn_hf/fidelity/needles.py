"""Make prompts that ask for facts in a long text: needles at given depths, in filler or in a list of needles.

RULER (Hsieh et al. 2024) has the same kinds:

- `single`: one needle in filler.
- `multikey`: a text made only of needles. Some are asked for, each in a separate question.
- `multivalue`: several values of one key in filler.
- `multiquery`: several keys in filler, asked for one after another, so a question follows the earlier answers.

Lengths are exact, in tokens of the model's tokenizer. They include text, questions and the room for answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from qattn_hf.assets import demo_tasks
from qattn_hf.errors import QAttnError

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KINDS = ("single", "multikey", "multivalue", "multiquery")
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)  # per cent of the text before a needle
AFTER = 2  # tokens of an answer after its last value: one ends the number, one ends the sentence

Pairs = list[tuple[str, str]]


class Form(NamedTuple):
    """Wording of a needle and of its questions.

    `pairs` makes keys and values, which replace `{key}` and `{value}`. `question` asks for the value of a key,
    `question_all` for all values of it. The answer follows a question after a space.
    """

    pairs: Callable[[random.Random, int], Pairs]
    head: str
    needle: str
    question: str
    question_all: str


class Template(NamedTuple):
    """Wording of needles in filler (`hidden`), and of needles in a list (`listed`)."""

    hidden: Form
    listed: Form


class Question(NamedTuple):
    """Tokens of a question, the values expected in its answer, their depths in per cent, and the tokens to write."""

    ids: list[int]
    values: tuple[str, ...]
    depths: tuple[float, ...]
    room: int


class Prompt(NamedTuple):
    """Tokens of a text, and questions about it.

    If `chained`, each question follows the answer before it. Otherwise each question follows the text alone."""

    kind: str
    length: int
    context: list[int]
    questions: list[Question]
    chained: bool


def _things(rng: random.Random, n: int) -> Pairs:
    """Make keys such as `Iris-stones-76`, each with a number of seven digits."""
    names, things = demo_tasks.NAMES, demo_tasks.THINGS
    places = rng.sample(range(len(names) * len(things) * 90), n)
    keys = (f"{names[i // 90 // len(things)]}-{things[i // 90 % len(things)]}-{i % 90 + 10}" for i in places)
    return [(key, str(rng.randint(10**6, 10**7 - 1))) for key in keys]


def _names(rng: random.Random, n: int) -> Pairs:
    return [(name, str(rng.randint(10**4, 10**5 - 1))) for name in rng.sample(demo_tasks.NAMES, n)]


def _registry(rng: random.Random, n: int) -> Pairs:
    return list(demo_tasks.registry(rng, n).items())


RULER = Form(
    _things,
    "Special magic numbers are hidden in the text that follows. Remember them, for you will be asked for them.\n",
    " One of the special magic numbers for {key} is: {value}.",
    "\nWhat is the special magic number for {key} in the text? The special magic number for {key} in the text is",
    "\nWhat are all the special magic numbers for {key} in the text? "
    "The special magic numbers for {key} in the text are",
)
SECRET = Form(
    _names,
    "",
    " The secret number of {key} is {value}. Remember it.",
    "\nWhat is the secret number of {key}? The secret number of {key} is",
    "\nWhat are the secret numbers of {key}? The secret numbers of {key} are",
)
REGISTRY = Form(_registry, demo_tasks.registry_text({}), "{key}: {value}\n", demo_tasks.ask("{key}"), "")
TEMPLATES = {"ruler": Template(RULER, RULER), "pairs": Template(SECRET, REGISTRY)}


class PromptMaker:
    """Makes prompts for one tokenizer, template and filler.

    Args:
        tokenizer: a tokenizer of Transformers. Its BOS token, if it has one, begins each text.
        template: a key of `TEMPLATES`. `ruler` uses English sentences. `pairs` uses secret numbers in prose and
            registries of names and numbers, which the bundled small models were trained on.
        filler: text around needles, repeated where it is too short, and cut between sentences to insert a needle.

    Raises:
        QAttnError: the template is unknown, or the filler has no text.
    """

    def __init__(self, tokenizer: Any, template: str = "ruler", filler: str = FILLER):
        check_asked((), DEPTHS, template)
        self.tokenizer, self.template = tokenizer, TEMPLATES[template]
        self.first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.filler = self.tokens(f" {filler.strip()}") if filler.strip() else []
        if not self.filler:
            raise QAttnError("the filler has no text: give another file, or none")
        ending = (".", "!", "?", "\n")
        self.stops = {i for i in set(self.filler) if tokenizer.decode([i]).rstrip(" ").endswith(ending)}

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a piece of text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def prompts(self, kind: str, length: int, depths: Sequence[float] = DEPTHS, seed: int = 0) -> list[Prompt]:
        """Make prompts of `length` tokens that ask for a value at each depth.

        Kind `single` gives one prompt for each depth. The other kinds give one prompt.

        Args:
            kind: one of `KINDS`.
            depths: per cent of the text before a needle, distinct numbers of 0 to 100.
            seed: seed of the keys, the values and the place in the filler. One seed always gives the same prompts.

        Raises:
            QAttnError: the kind is unknown, a depth is wrong, the template has fewer keys than needles, or the length
                is too short.
        """
        check_asked([kind], depths)
        rng = random.Random(f"{kind} {length} {seed}")  # a string seed: Python seeds it alike in every process
        depths = sorted(depths)
        if kind == "single":
            return [self._hidden(rng, kind, length, [depth]) for depth in depths]
        return [self._listed(rng, length, depths) if kind == "multikey" else self._hidden(rng, kind, length, depths)]

    def _hidden(self, rng: random.Random, kind: str, length: int, depths: Sequence[float]) -> Prompt:
        """Make a prompt with needles in filler."""
        form = self.template.hidden
        pairs = _made(form, rng, len(depths))
        if kind == "multivalue":
            pairs = [(pairs[0][0], value) for _, value in pairs]
            questions = [self._question(form.question_all, pairs, depths)]
        else:
            asked = zip(pairs, depths, strict=True)
            questions = [self._question(form.question, [pair], [depth]) for pair, depth in asked]
        needles = [self.tokens(form.needle.format(key=key, value=value)) for key, value in pairs]
        begin = [*self.first, *self.tokens(form.head)]
        room = sum(len(question.ids) + question.room for question in questions)
        size = length - len(begin) - room - sum(map(len, needles))
        if size < len(needles):
            least = length - size + len(needles)
            raise QAttnError(f"{kind}: {length} tokens are too few for {len(needles)} needles: {_fewer(least)}")
        text, context, last = self._filler(rng, size), begin, 0
        ends = [0, *(i + 1 for i, token in enumerate(text) if token in self.stops), size]
        for needle, depth in zip(needles, depths, strict=True):
            place = min(ends, key=lambda end: abs(end - size * depth / 100))
            context = [*context, *text[last:place], *needle]
            last = place
        return Prompt(kind, length, [*context, *text[last:]], questions, chained=True)

    def _listed(self, rng: random.Random, length: int, depths: Sequence[float]) -> Prompt:
        """Make a prompt with a list of needles. Filler before the list makes the length exact."""
        form = self.template.listed
        sample = [self.tokens(form.needle.format(key=key, value=value)) for key, value in _made(form, rng, 32)]
        shortest = min(map(len, sample))
        pairs = _made(form, rng, max(1, length // shortest))
        asked = [self._question(form.question, [pair], [0.0]) for pair in pairs]
        room = max(len(question.ids) + question.room for question in asked)
        head, needles, left = self.tokens(form.head), [], length - len(self.first) - room
        left -= len(head)
        for key, value in pairs:
            ids = self.tokens(form.needle.format(key=key, value=value))
            if len(ids) > left:
                break
            needles.append(ids)
            left -= len(ids)
        places = [round(depth / 100 * (len(needles) - 1)) for depth in depths]
        if left < 0 or len(set(places)) < len(depths):
            short = f"{length} tokens are too few for {len(depths)} depths in a list of {len(needles)} needles"
            raise QAttnError(f"multikey: {short}: {_fewer(room + len(head) + shortest * (2 * len(depths)))}")
        context = [*self.first, *self._filler(rng, left), *head, *(i for ids in needles for i in ids)]
        questions = [asked[i]._replace(depths=(depth,)) for i, depth in zip(places, depths, strict=True)]
        return Prompt("multikey", length, context, questions, chained=False)

    def _question(self, wording: str, pairs: Pairs, depths: Sequence[float]) -> Question:
        """Make the question for the values of `pairs`, which share one key."""
        values = tuple(value for _, value in pairs)
        room = len(self.tokens(" " + ", ".join(values))) + AFTER
        return Question(self.tokens(wording.format(key=pairs[0][0])), values, tuple(depths), room)

    def _filler(self, rng: random.Random, size: int) -> list[int]:
        """Return filler of `size` tokens that begins with a sentence."""
        starts = [i + 1 for i, token in enumerate(self.filler[:-1]) if token in self.stops]
        start = rng.choice([0, *starts])
        times = -(-size // len(self.filler))
        return ((self.filler[start:] + self.filler[:start]) * times)[:size]


def check_asked(kinds: Iterable[str], depths: Sequence[float], template: str = "ruler") -> None:
    """Check a request for prompts before a model is loaded.

    Raises:
        QAttnError: a kind or the template is unknown, or the depths are not distinct numbers of 0 to 100.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise QAttnError(f"kind {kind}: there are {', '.join(KINDS)}")
    if not depths or len(set(depths)) < len(depths) or not all(0 <= depth <= 100 for depth in depths):
        raise QAttnError(f"depths {', '.join(f'{d:g}' for d in depths)}: give different ones of 0 to 100 per cent")
    if template not in TEMPLATES:
        raise QAttnError(f"template {template}: there are {', '.join(TEMPLATES)}")


def _made(form: Form, rng: random.Random, n: int) -> Pairs:
    try:
        return form.pairs(rng, n)
    except ValueError as error:
        raise QAttnError(
            f"the template has not {n} different keys: give fewer depths, a shorter length or another template"
        ) from error


def _fewer(tokens: int) -> str:
    return f"give a length of some {tokens} tokens at least, or fewer depths"


def all_prompts(
    maker: PromptMaker, kinds: Iterable[str], lengths: Iterable[int], depths: Sequence[float] = DEPTHS, seeds: int = 1
) -> list[Prompt]:
    """Make the prompts of every length, kind and seed from 0 to `seeds` - 1, as `PromptMaker.prompts` does."""
    asked = [
        (kind, length, seed)
        for length in sorted(set(lengths))
        for kind in dict.fromkeys(kinds)
        for seed in range(seeds)
    ]
    return [prompt for kind, length, seed in asked for prompt in maker.prompts(kind, length, depths, seed)]
