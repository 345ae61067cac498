"""Tables on stdout whose figures stay whole. Importing this module imports neither torch nor rich."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 200  # a file has no edge
TEXT_WIDTH = 12  # no column of text is folded to fewer characters
GAP = 2  # between columns


def results_console() -> Console:
    """The console of stdout, for results."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def print_figures(
    header: Sequence[str], lines: Sequence[Sequence[str]], texts: Collection[str], wide: bool = False
) -> None:
    """Print a table. On a narrow terminal columns of text are folded; figures are neither folded nor cut.

    Where the figures alone are wider than the terminal, lines run on, and the terminal breaks them.

    Args:
        header: names of the columns. lines: their cells, each of one or more lines of text.
        texts: names of the columns that hold text, aligned left; all others hold figures, aligned right.
        wide: whether to fold no text, however narrow the terminal is.
    """
    from rich.table import Table
    from rich.text import Text

    table, console, least = Table(box=None, pad_edge=False), results_console(), 0
    for name, *cells in zip(header, *lines, strict=True):
        widest = max(len(part) for cell in (name, *cells) for part in cell.split("\n"))
        if name in texts:
            widest = widest if wide else min(widest, TEXT_WIDTH)
            table.add_column(name, overflow="fold", min_width=widest)
        else:
            table.add_column(name, justify="right", no_wrap=True, min_width=widest)
        least += widest + GAP
    for line in lines:
        table.add_row(*map(Text, line))
    console.width = max(console.width, least)
    console.print(table)
