"""A page as one HTML file, which needs no network: light or dark as the reader has it."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from bigbatch.log.atomic_files import GENERATOR
from bigbatch.log.chart_svg import stylesheet


def web_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """The page: a title as text, a body as HTML, CSS of its own, a script that it may lack."""
    css = stylesheet() + text_of("web_page.css") + style
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{GENERATOR}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n{body}\n"
        + f"<script>\n{script}</script>\n" * bool(script)
        + "</body>\n</html>\n"
    )


class Tile(NamedTuple):
    """A fact with its name, and what more is said of it."""

    name: str
    value: str
    note: str = ""
    color: str = ""  # CSS class, which sets `--own`


def tiles(facts: Iterable[Tile]) -> str:
    """Facts side by side."""
    parts = (
        f'<div class="tile {one.color}"><span>{escape(one.name)}</span>'
        f"<strong>{escape(one.value)}</strong><span>{escape(one.note)}</span></div>"
        for one in facts
    )
    return f'<div class="tiles">{"".join(parts)}</div>'


def note(text: str) -> str:
    """A paragraph of small text."""
    return f'<p class="note">{escape(text)}</p>'


def details(title: str, text: str, *, is_open: bool = False) -> str:
    """Lines of text that a click on their title shows, or hides."""
    summary = f"<summary>{escape(title)}</summary>"
    return f"<details{' open' * is_open}>{summary}<pre>{escape(text)}</pre></details>"


def html_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, which scrolls sideways where it is too wide."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>'
        "</table></div>"
    )


def text_of(name: str, package: str = "bigbatch.log") -> str:
    """The text of a file in a package."""
    return resources.files(package).joinpath(name).read_text()
