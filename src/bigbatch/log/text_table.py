"""Tables and texts as lines that fit a terminal."""

import shutil
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import fill, wrap

from bigbatch.errors import printable
from bigbatch.log.history import Table

_NARROWEST = 8  # letters of a column, at least


def terminal_width() -> int:
    """Columns of the terminal; 80 if there is none and COLUMNS is not set."""
    return shutil.get_terminal_size().columns


def wrapped(text: str) -> str:
    """The text in lines of the terminal's width.

    A line that only names a path, or has a word that is longer, stays whole.
    """
    width, lines = terminal_width(), []
    for line in text.splitlines():
        words, indent = line.split(), " " * (len(line) - len(line.lstrip()))
        if len(line) > width and len(words) > 2 and max(map(len, words)) <= width - len(indent):
            line = fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
        lines.append(line)
    return "\n".join(lines)


def text_table(table: Table, title: str, width: int) -> str:
    """The table under its title, in lines of at most `width` letters.

    Columns stand two blanks apart, all but the first to the right. Headers are wrapped first, then
    the cells of the widest columns; columns for which there is no room are a second table below.
    """
    columns, *rows = [tuple(map(printable, row)) for row in (table.columns, *table.rows)]
    widths = [
        max(map(len, [*name.split(), *(row[number] for row in rows)]))
        for number, name in enumerate(columns)
    ]
    parts = [[0]]  # columns side by side
    for number in range(1, len(columns)):
        least = [min(widths[one], _NARROWEST) + 2 for one in (*parts[-1], number)]
        if sum(least) - 2 > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(number)
    lines = [*wrap(printable(title), width), ""]
    for part in parts:
        cells = [[row[number] for number in part] for row in (columns, *rows)]
        lines += [*_lines_of(cells, [widths[number] for number in part], width), ""]
    return "\n".join(lines)


def _lines_of(cells: Sequence[Sequence[str]], widths: list[int], width: int) -> list[str]:
    """The lines of rows, of which the first has the headers."""
    columns, *rows = cells
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    rule = "  ".join("-" * one for one in widths)
    body = (line for row in rows for line in _lines(row, widths))
    return [*_lines(columns, widths, at_bottom=True), rule, *body]


def _lines(cells: Sequence[str], widths: Sequence[int], *, at_bottom: bool = False) -> list[str]:
    """The lines of a row, whose cells are wrapped."""
    order = -1 if at_bottom else 1
    wrapped = [(wrap(cell, one) or [""])[::order] for cell, one in zip(cells, widths, strict=True)]
    return [
        "  ".join(
            text.rjust(one) if number else text.ljust(one)
            for number, (text, one) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [*zip_longest(*wrapped, fillvalue="")][::order]
    ]
