"""Keep prefixes of prompts whose pages alone do not determine how a request continues.

With a sink pool, or with tokens that stay open after their block, a row depends on where its prompt ended. A kept
prefix is therefore a row cropped to whole blocks, plus the pages of the request that wrote it. A request that begins
with the prefix copies the row and shares the pages. Calls never rewrite a shared page: masks are in the row. A block
that two rows close has the same tokens and sinks in both rows, hence the same bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

SEEN = 2**16  # remembered blocks of earlier prompts, to find where two prompts diverge
KEPT = "prefix "  # prefix of the names under which kept prefixes hold their pages


class Match(NamedTuple):
    """Known prefixes of a prompt: the longest kept one, and the longest one shared with an earlier prompt.

    Attributes:
        name: name of the kept prefix; None if there is none.
        tokens: tokens of the kept prefix.
        seen: tokens of the prefix shared with an earlier prompt.
    """

    name: str | None
    tokens: int
    seen: int


class Prefixes:
    """Kept prefixes and their rows, ordered by last use; the most recent is last.

    Args:
        rows: rows of each layer reserved for prefixes.
        block: tokens of a page.
    """

    def __init__(self, rows: Sequence[int], block: int):
        self.rows, self.block = rows, block
        self.clear()

    def clear(self) -> None:
        """Forget all prefixes."""
        self.kept: OrderedDict[str, int] = OrderedDict()
        self.seen: OrderedDict[str, None] = OrderedDict()

    def match(self, names: Sequence[str]) -> Match:
        """Return the known prefixes of a prompt, whose prefixes have these `names`."""
        name, tokens, seen = None, 0, 0
        for index, one in enumerate(names):
            if one in self.kept:
                name, tokens = one, (index + 1) * self.block
            if one in self.seen:
                seen = (index + 1) * self.block
        if name is not None:
            self.kept.move_to_end(name)
        return Match(name, tokens, seen)

    def remember(self, prompt: Sequence[int]) -> str | None:
        """Remember the blocks of a prompt that was read. Return the name of its whole blocks; None if it has none."""
        names = self.names(prompt)
        for one in names:
            self.seen[one] = None
            self.seen.move_to_end(one)
        while len(self.seen) > SEEN:
            self.seen.popitem(last=False)
        return names[-1] if names else None

    def room(self, busy: set[int]) -> tuple[int | None, str | None]:
        """Return a row for a new prefix, and the name of the prefix to evict from it.

        The least recently used prefix whose row is not `busy` is evicted. The row is None if all rows are busy.
        """
        free = [row for row in self.rows if row not in self.kept.values() and row not in busy]
        if free:
            return free[0], None
        return next(((row, name) for name, row in self.kept.items() if row not in busy), (None, None))

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Return a name for each prefix of whole blocks."""
        digest, names = hashlib.blake2b(digest_size=16), []
        for end in range(self.block, len(tokens) + 1, self.block):
            digest.update(array("q", tokens[end - self.block : end]).tobytes())
            names.append(KEPT + digest.hexdigest())
        return names
