"""Data and scores of tasks that are generated from a seed, without downloads.

lm-eval calls the data functions as `custom_dataset`, with a task's `dataset_kwargs` and all metadata, including model
arguments.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from qattn_hf.assets import demo_tasks
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.needles import FILLER

LENGTHS = tuple(1024 << i for i in range(8))  # lengths for which needles and tool calls have a metric
ANSWER = 32  # tokens of a length reserved for the answer and a first special token
DEPTHS = (0, 25, 50, 75, 100)  # per cent of the text before the sentence


def datasets_of(**rows: list[dict[str, Any]]) -> Any:
    """Make a `DatasetDict` from rows, by the names of their splits."""
    from datasets import Dataset, DatasetDict

    return DatasetDict({name: Dataset.from_list(split) for name, split in rows.items()})


def sums(**metadata: Any) -> Any:
    """Make 400 word sums, and eight for few-shot prompts, as `question` and `answer` in GSM8K's form."""
    rng = random.Random(0)
    rows = [dict(zip(("question", "answer"), demo_tasks.sums(rng), strict=True)) for _ in range(408)]
    return datasets_of(train=rows[:8], test=rows[8:])


def recall(pairs: int, **metadata: Any) -> Any:
    """Make 200 lists of `pairs` names with numbers and a question about one name, as `input` and `target`."""
    rng = random.Random(pairs)
    return datasets_of(
        test=[dict(zip(("input", "target"), demo_tasks.recall(rng, pairs), strict=True)) for _ in range(200)]
    )


def needle(
    distractors: int,
    lengths: Sequence[int] = (1024, 2048, 4096),
    depths: Sequence[int] = DEPTHS,
    samples: int = 4,
    **metadata: Any,
) -> Any:
    """Needle in a haystack: a sentence with a number in filler text, among sentences with other keys.

    Args:
        distractors: number of sentences with other keys.
        lengths: tokens of a text.
        depths: positions of the sentence, in per cent.
        samples: rows for each length and depth.
        metadata: `tokenizer` or `pretrained` names the tokenizer that counts tokens.

    Raises:
        QAttnError: the task has no metric for a length or depth, or no tokenizer is named.
    """
    if other := [n for n in lengths if n not in LENGTHS] + [d for d in depths if d not in DEPTHS]:
        raise QAttnError(f"needle: {other[0]}: lengths are of {LENGTHS}, depths of {DEPTHS}")
    tokenizer = tokenizer_of(metadata, "needle")

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    rng = random.Random(distractors)
    rows = [_hidden(rng, n, d, distractors, count) for n in lengths for d in depths for _ in range(samples)]
    return datasets_of(test=rows)


def tokenizer_of(metadata: dict[str, Any], task: str) -> Any:
    """Return the tokenizer that counts a task's tokens.

    Raises:
        QAttnError: `metadata` has neither `tokenizer` nor `pretrained`.
    """
    from transformers import AutoTokenizer

    source = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(source, str):
        raise QAttnError(f"{task} counts tokens: name a tokenizer, --metadata tokenizer=FOLDER_OR_HUB_NAME")
    return AutoTokenizer.from_pretrained(source)


def _hidden(
    rng: random.Random, length: int, depth: int, distractors: int, count: Callable[[str], int]
) -> dict[str, Any]:
    keys = list(demo_tasks.registry(rng, distractors + 1).items())
    sentences = [f"The special magic number of {name} is {number}. " for name, number in keys]
    (asked, number), question = keys[0], f"\nWhat is the special magic number of {keys[0][0]}?\nAnswer:"
    filler_tokens = length - ANSWER - count("".join(sentences) + question)
    lines = [FILLER] * (filler_tokens // count(FILLER * 8) * 8)
    lines += [FILLER] * max(0, (filler_tokens - count("".join(lines))) // count(FILLER))
    for sentence in sentences[1:]:
        lines.insert(rng.randint(0, len(lines)), sentence)
    lines.insert(round(len(lines) * depth / 100), sentences[0])
    text = "".join(lines) + question
    return {"input": text, "target": number, "name": asked, "length": length, "depth": depth}


def needle_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score 1 if the first number of the answer is right, else 0: in total (`acc`), by depth and by length."""
    number = re.search(r"\d+", results[0])
    right = float(number is not None and number.group() == doc["target"])
    return {"acc": right, f"depth_{doc['depth']}": right, f"tokens_{doc['length']}": right}


def drift(lines: int = 480, cycle: int = 12, **metadata: Any) -> Any:
    """Make ten cycles of `cycle` names, to be continued over `lines` numbered lines, as `input` and `target`."""
    rng = random.Random(lines)
    rows = []
    for _ in range(10):
        names = rng.sample(demo_tasks.NAMES, cycle)
        numbered = [f"{i + 1}: {names[i % cycle]}\n" for i in range(2 * cycle + lines)]
        rows.append({"input": "".join(numbered[: 2 * cycle]), "target": "".join(numbered[2 * cycle :])})
    return datasets_of(test=rows)


def drift_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the share of right lines in total (`acc`) and in each quarter of the list. Lines are matched by number."""
    wanted, answered = _numbered(doc["target"]), _numbered(results[0])
    right = [float(answered.get(number) == name) for number, name in wanted.items()]
    size = -(-len(right) // 4)
    quarters = [right[i : i + size] for i in range(0, len(right), size)]
    quarter_scores = {f"quarter_{i}": sum(part) / len(part) for i, part in enumerate(quarters, 1)}
    return {"acc": sum(right) / len(right), **quarter_scores}


def _numbered(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\s*(\d+): *(\w+)", text, re.MULTILINE))
