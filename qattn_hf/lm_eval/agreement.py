"""Measure how often a method gives the same answer as full precision, right or wrong."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from qattn_hf.lm_eval.generated import LENGTHS

UNANSWERED = "[invalid]"  # lm-eval's word for an answer in which the filter finds nothing
HOLDS = 0.9  # a method holds at a length if at least this share of answers is equal

Place = tuple[str, str, int]  # task, filter, number of the row


class Answer(NamedTuple):
    """The answer to a row in comparable form, and the row's length in tokens if the task has lengths."""

    said: Any
    length: int | None

    @property
    def missing(self) -> bool:
        """Whether the task's filter found nothing in the answer."""
        return UNANSWERED in (self.said if isinstance(self.said, list | tuple) else [self.said])


def answers(samples: dict[str, list[dict[str, Any]]]) -> dict[Place, Answer]:
    """Collect answers from lm-eval's `samples`: texts after their filter, or the index of the choice.

    Rows without an answer, such as rows of a perplexity, are left out.
    """
    found = {}
    for task, rows in samples.items():
        for row in rows:
            said = _said(row["filtered_resps"])
            if said is not None:
                length = row["doc"].get("length") if isinstance(row["doc"], dict) else None
                length = length if length in LENGTHS else None  # LongBench counts words
                found[task, row["filter"], row["doc_id"]] = Answer(said, length)
    return found


def _said(responses: Any) -> Any:
    """Return a comparable answer: texts unchanged, for several choices the index of the likeliest one.

    A choice is a pair of its log-likelihood and whether greedy decoding gives it. For a single choice, return the
    latter."""
    if all(isinstance(response, tuple | list) and _is_score(response) for response in responses):
        if len(responses) == 1:
            return bool(responses[0][1])
        return max(range(len(responses)), key=lambda i: responses[i][0])
    return None if any(isinstance(response, float) for response in responses) else responses


def _is_score(response: Any) -> bool:
    return len(response) == 2 and isinstance(response[0], float)


def agreement(own: dict[Place, Answer], full: dict[Place, Answer], task: str, kind: str) -> dict[str, Any]:
    """Compare the answers of a task that both a method and full precision have.

    Questions that neither answers are left out: two missing answers are no agreement.

    Args:
        own, full: `answers` of a method and of full precision.
        task: name of the task.
        kind: name of lm-eval's filter.

    Returns:
        The share of equal answers (`agrees`) with its standard error, and the number of questions that neither answers
        (`both_unanswered`). If rows have lengths, also `agrees_by_length`, and `holds_to`, the length up to which the
        share is at least `HOLDS`. Empty if no question is left.
    """
    lengths: dict[int | None, list[bool]] = defaultdict(list)
    both_unanswered = 0
    for place, answer in own.items():
        if place[:2] == (task, kind) and place in full:
            if answer.missing and full[place].missing:
                both_unanswered += 1
            else:
                lengths[answer.length].append(answer.said == full[place].said)
    equal = [one for of_length in lengths.values() for one in of_length]
    if not equal:
        return {}
    share = sum(equal) / len(equal)
    found: dict[str, Any] = {"agrees": share, "both_unanswered": both_unanswered}
    found["agrees_stderr"] = (share * (1 - share) / (len(equal) - 1)) ** 0.5 if len(equal) > 1 else None
    if None not in lengths:
        by_length = {length: sum(lengths[length]) / len(lengths[length]) for length in sorted(lengths)}  # type: ignore[type-var]
        found |= {"agrees_by_length": by_length, "holds_to": holds_to(by_length)}
    return found


def holds_to(by_length: dict[Any, float]) -> int:
    """Return the greatest length up to which the share is at least `HOLDS` at every length, or 0."""
    held = 0
    for length, share in by_length.items():
        if share < HOLDS:
            break
        held = length
    return held
