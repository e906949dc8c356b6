"""Tables in Markdown, and their places in the pages."""

import re
from collections.abc import Mapping, Sequence

from bigbatch.errors import RunError

_BEGIN = "<!-- results:"
_PLACE = re.compile(rf"({_BEGIN} (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table with one line for each row; the columns are the keys of the first."""
    if not rows:
        return "None were made."
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([row[column] for column in rows[0]] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table_of(page: str, section: str) -> list[dict[str, str]]:
    r"""The rows of the first table below the heading of a section, by the names of the columns.

    Raises:
        ValueError: there is no such section, it has no table, or a row has another number of cells.
    Example:
        >>> table_of("## A\n| b | c |\n|---|---|\n| 1 | 2 |\n\n## D\n", "A")
        [{'b': '1', 'c': '2'}]
    """
    _, heading, rest = f"\n{page}".partition(f"\n## {section}\n")
    if not heading:
        raise ValueError("there is no such section")
    table = re.search(r"^\|.+\|\n\|[-| ]+\|\n(\|.*\n?)+", rest.split("\n## ")[0], re.MULTILINE)
    if table is None:
        raise ValueError("the section has no table")
    header, _, *lines = (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in table[0].splitlines()
    )
    return [dict(zip(header, cells, strict=True)) for cells in lines]


def fill(page: str, tables: Mapping[str, str]) -> str:
    r"""A page with the tables at their places, between `<!-- results: NAME -->` and `<!-- end -->`.

    Raises:
        RunError: a place has no table, or no end.
    Example:
        >>> fill("<!-- results: a -->\nold\n<!-- end -->", {"a": "new"})
        '<!-- results: a -->\nnew\n<!-- end -->'
    """
    if len(_PLACE.findall(page)) != page.count(_BEGIN):
        raise RunError(f"write each place as `{_BEGIN} NAME -->` and `<!-- end -->`, a line each")
    if unknown := {match["name"] for match in _PLACE.finditer(page)} - tables.keys():
        raise RunError(f"there is no log for {', '.join(sorted(unknown))}; train it, or drop it")
    return _PLACE.sub(lambda match: f"{match[1]}{tables[match['name']]}\n{match[3]}", page)
