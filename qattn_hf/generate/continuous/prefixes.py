"""Prefixes of prompts that a pool keeps where pages alone do not say how a request goes on.

With a sink pool, and with tokens that stay open behind their block, a row depends on where its prompt ended. So a kept
prefix is a row too, cropped to whole blocks, next to the pages of the request that wrote it. A request that begins with
it takes a copy of the row and shares the pages. Calls write no shared page anew: masks are in the row, and a block that
two rows close has the same tokens and the same sinks in both, so the same bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

SEEN = 2**16  # blocks of earlier prompts that are remembered, to find where two prompts part
KEPT = "prefix "  # begins the name under which a kept prefix holds its pages, as a request does


class Match(NamedTuple):
    """What is known of a prompt: the longest prefix that is kept, and the longest that an earlier prompt began with.

    Attributes:
        name: of the kept prefix; None where none is. tokens: that it has. seen: tokens of the other.
    """

    name: str | None
    tokens: int
    seen: int


class Prefixes:
    """Which prefixes are kept in which rows, the one used last at the end.

    Args:
        rows: of layers, for prefixes alone. block: tokens of a page.
    """

    def __init__(self, rows: Sequence[int], block: int):
        self.rows, self.block = rows, block
        self.clear()

    def clear(self) -> None:
        """Keep none."""
        self.kept: OrderedDict[str, int] = OrderedDict()
        self.seen: OrderedDict[str, None] = OrderedDict()

    def match(self, prompt: Sequence[int]) -> Match:
        """What is known of a prompt, of whose tokens at least one is left to read."""
        name, tokens, seen = None, 0, 0
        for index, one in enumerate(self._names(prompt[:-1])):
            if one in self.kept:
                name, tokens = one, (index + 1) * self.block
            if one in self.seen:
                seen = (index + 1) * self.block
        if name is not None:
            self.kept.move_to_end(name)
        return Match(name, tokens, seen)

    def remember(self, prompt: Sequence[int]) -> str | None:
        """Note the blocks of a prompt that was read; the name of its whole blocks, None where it has none."""
        names = self._names(prompt)
        for one in names:
            self.seen[one] = None
            self.seen.move_to_end(one)
        while len(self.seen) > SEEN:
            self.seen.popitem(last=False)
        return names[-1] if names else None

    def room(self, busy: set[int]) -> tuple[int | None, str | None]:
        """A row for another prefix, and the name of the one that has to leave it: of those that are not `busy` the one
        that was used least lately. None where all are."""
        free = [row for row in self.rows if row not in self.kept.values() and row not in busy]
        if free:
            return free[0], None
        return next(((row, name) for name, row in self.kept.items() if row not in busy), (None, None))

    def _names(self, tokens: Sequence[int]) -> list[str]:
        """A name for each of the prefixes of whole blocks."""
        digest, names = hashlib.blake2b(digest_size=16), []
        for end in range(self.block, len(tokens) + 1, self.block):
            digest.update(array("q", tokens[end - self.block : end]).tobytes())
            names.append(KEPT + digest.hexdigest())
        return names
