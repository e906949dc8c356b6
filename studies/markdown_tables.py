"""Tables in Markdown, which every study writes to stdout."""

import sys
from collections.abc import Iterable, Mapping, Sequence

Row = Mapping[str, str]
"""The cells of one row of a table, by column."""


def markdown_table(rows: Sequence[Row]) -> str:
    """A table with one line for each row; the columns are the keys of the first."""
    return "\n".join(_lines(rows)) or "None were made."


def show(title: str, rows: Iterable[Row]) -> None:
    """Writes a title and a table to stdout, each row as soon as it is known."""
    sys.stdout.write(f"{title}\n\n")
    for line in _lines(rows):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    sys.stdout.write("\n")


def _lines(rows: Iterable[Row]) -> Iterable[str]:
    columns: list[str] = []
    for row in rows:
        if not columns:
            columns = list(row)
            yield _line(columns)
            yield _line(["---"] * len(columns))
        yield _line(row[column] for column in columns)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
