"""Tables as plain text."""

from collections.abc import Sequence
from textwrap import wrap

from bigbatch.errors import printable
from bigbatch.log.history import Table

_NARROWEST = 8  # letters of a column, at least


def text_table(table: Table, title: str, width: int) -> str:
    """The table under its title, in lines of at most `width` letters where its columns allow it.

    Columns stand two blanks apart, all but the first to the right. Headers are wrapped first, then
    the cells of the widest columns.
    """
    columns, *rows = [tuple(map(printable, row)) for row in (table.columns, *table.rows)]
    widths = [
        max(map(len, [*name.split(), *(row[number] for row in rows)]))
        for number, name in enumerate(columns)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    rule = "  ".join("-" * one for one in widths)
    lines = [printable(title), "", *_lines(columns, widths, at_bottom=True), rule]
    lines += (line for row in rows for line in _lines(row, widths))
    return "\n".join([*lines, ""])


def _lines(cells: Sequence[str], widths: Sequence[int], *, at_bottom: bool = False) -> list[str]:
    """The lines of a row, whose cells are wrapped."""
    wrapped = [wrap(cell, one) or [""] for cell, one in zip(cells, widths, strict=True)]
    height = max(map(len, wrapped))
    blank = [[""] * (height - len(lines)) for lines in wrapped]
    padded = [b + w if at_bottom else w + b for w, b in zip(wrapped, blank, strict=True)]
    return [
        "  ".join(
            text.rjust(one) if number else text.ljust(one)
            for number, (text, one) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip(*padded, strict=True)
    ]
