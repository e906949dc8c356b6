"""The project's words are the field's: docs/decisions/0015."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/bigbatch", "tests", "examples", "docs")
HISTORY = {"LOG.md", "0015-the-fields-words.md", Path(__file__).name}  # name what was before
REPLACED = (  # by the term that a user would search for
    r"anew|besides?|whence|thereof|go(?:es|ing)? on|went on|told|the house|the door|"
    r"fold(?:s|ed|ing)?|pieces?|pictures?|guess(?:es|ed)?|laws?|twins?|tail|dealt|borrow(?:s|ed|ing)?|"
    r"what joins the ranks|how well its gradient is known"
)
WORDS = re.compile(rf"(?<![A-Za-z])(?:{REPLACED})(?![A-Za-z])", re.IGNORECASE)
NAMES = re.compile(r"(?<![\w\"'`])(mine|here|there|everywhere|held|of_sum)(?=\s*(?:=[^=]|\.\w|\())")
OF_OTHERS = re.compile(r"overflow.*\"fold\"|\"fold\", 8")


def files_of(folder: str) -> list[Path]:
    """Text that people read: Python, Markdown, HTML, C."""
    endings = {".py", ".md", ".html", ".c"}
    files = (file for file in (ROOT / folder).rglob("*") if file.suffix in endings)
    return sorted(file for file in files if file.name not in HISTORY)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_words_are_the_fields(folder):
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files_of(folder)
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if (WORDS.search(line) and not OF_OTHERS.search(line))
        or (file.suffix == ".py" and NAMES.search(line.split("#")[0]))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_words_of_the_first_pages_are_the_fields(name):
    assert not [line for line in (ROOT / name).read_text().splitlines() if WORDS.search(line)]


def test_a_word_that_was_replaced_is_found():
    assert WORDS.search("the run goes on")
    assert WORDS.search("_fold(how)")
    assert NAMES.search("mine = 1")
    assert not WORDS.search("unfolded lawn")
