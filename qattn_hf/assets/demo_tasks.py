"""The demo model's two tasks as seeded generators: word sums and recall from a name-number list.

Pure Python, no torch: the training script, `qattn demo` and the tests all draw from here.
Every generator takes a `random.Random` and consumes only it, so equal seeds give equal prompts.
"""

from __future__ import annotations

import random
import re

# fmt: off
NAMES = (
    "Alice", "Anna", "Ben", "Bob", "Claire", "Clara", "Dave", "David", "Emma", "Eve", "Frank", "Grace", "Henry", "Iris",
    "Jack", "Kate", "Leo", "Mia", "Noah", "Olivia", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Tom", "Victor", "Wendy",
    "Zoe",
)
THINGS = (
    "apples", "books", "bottles", "buttons", "cakes", "candles", "cards", "coins", "cookies", "eggs", "flowers",
    "marbles", "oranges", "pencils", "shells", "stamps", "stickers", "stones", "tickets", "toys",
)
PLACES = ("farm", "garden", "kitchen", "library", "market", "office", "park", "school", "shop", "station")
# fmt: on
SENTENCES = {  # a: who owns, b: another person, n: how many, t: things, p: place
    "+": (
        "{b} gives {a} {n} {t}.",
        "{a} finds {n} {t} near the {p}.",
        "{a} buys {n} more {t} at the {p}.",
        "{a} adds {n} {t} to the box.",
    ),
    "-": ("{a} sells {n} {t}.", "{a} gives {n} {t} to {b}.", "{a} loses {n} {t} on the way to the {p}."),
    "*": ("Then the number of {t} grows to {n} times as many.",),
    "/": ("{a} splits the {t} into {n} equal piles and keeps one pile.",),
}


def step(rng: random.Random, value: int) -> tuple[str, int, int]:
    """One operation on `value` (1 to 300) that stays in that range: (operator, operand, result)."""
    while True:
        op = rng.choice("+++--*/")
        n = rng.randint(1, 50) if op in "+-" else rng.randint(2, 5 if op == "/" else 4)
        if op == "/" and (value % n or value < 2 * n):
            continue
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[op]
        if 0 < result <= 300:
            return op, n, result


def sums(rng: random.Random, steps: int | None = None) -> tuple[str, str]:
    """A word sum of `steps` operations (default 2 to 5): (question, answer).

    The answer has GSM8K's form: the working, then `#### n` on a line of its own.
    """
    a, b = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    value = rng.randint(5, 60)
    question, working = [f"{a} has {value} {thing}."], [f"{a} starts with {value} {thing}."]
    for _ in range(steps or rng.randint(2, 5)):
        op, n, result = step(rng, value)
        question.append(rng.choice(SENTENCES[op]).format(a=a, b=b, n=n, t=thing, p=rng.choice(PLACES)))
        working.append(f"{value} {op} {n} = {result}.")
        value = result
    question.append(f"How many {thing} does {a} have now?")
    return " ".join(question), f"{' '.join(working)}\n#### {value}"


def sum_prompt(question: str, shots: tuple[tuple[str, str], ...] = ()) -> str:
    """The prompt for `question`, after worked examples `shots` ((question, answer) pairs)."""
    worked = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in shots)
    return f"{worked}Question: {question}\nAnswer:"


def few_shot(rng: random.Random, shots: int = 0) -> tuple[str, str]:
    """A fresh sum after `shots` worked ones: (prompt, answer)."""
    *worked, (question, answer) = [sums(rng) for _ in range(shots + 1)]
    return sum_prompt(question, tuple(worked)), answer


def final_number(text: str) -> str | None:
    """The number after the first `####` of an answer, or None."""
    found = re.search(r"####\s*(-?\d+)", text)
    return found.group(1) if found else None


def registry(rng: random.Random, n: int) -> dict[str, str]:
    """`n` different names such as `Iris-76`, each with a number of four digits, in list order."""
    if n > 90 * len(NAMES):
        raise ValueError(f"at most {90 * len(NAMES)} different names, got n={n}")
    pairs: dict[str, str] = {}
    while len(pairs) < n:
        pairs[f"{rng.choice(NAMES)}-{rng.randint(10, 99)}"] = str(rng.randint(1000, 9999))
    return pairs


def registry_text(pairs: dict[str, str]) -> str:
    """The list as the model reads it: a heading, then one `name: number` a line."""
    return "Registry:\n" + "".join(f"{name}: {number}\n" for name, number in pairs.items())


def ask(name: str) -> str:
    """The question for one name of a registry; the answer follows after one space."""
    return f"Question: What is the number of {name}?\nAnswer:"


def recall(rng: random.Random, n: int = 10) -> tuple[str, str]:
    """A list of `n` pairs and a question for one of them: (prompt, number)."""
    pairs = registry(rng, n)
    name = rng.choice(list(pairs))
    return registry_text(pairs) + ask(name), pairs[name]
