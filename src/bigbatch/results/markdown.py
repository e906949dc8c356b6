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
