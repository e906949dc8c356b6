"""The project's words are the field's: docs/decisions/0015."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/bigbatch", "tests", "examples", "docs")
HISTORY = {"LOG.md", "0015-the-fields-words.md", Path(__file__).name}  # name what was before
REPLACED = (  # by the term that a user would search for
    r"anew|besides?|whence|thereof|go(?:es|ing)?\s+on|went\s+on|told|the\s+house|the\s+door|"
    r"fold(?:s|ed|ing)?|pieces?|pictures?|guess(?:es|ed|ing)?|laws?|twins?|tail|dealt|"
    r"borrow(?:s|ed|ing)?|what\s+joins\s+(?:the|its)\s+ranks|how\s+well\s+its\s+gradient\s+is\s+known"
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
        f"{file.relative_to(ROOT)}:{number}: {what}"
        for file in files_of(folder)
        for number, what in replaced_in(file)
    ]
    assert not found, "\n".join(found)


def replaced_in(file):
    """Line and text of what was replaced; a phrase may end on the next line."""
    text = OF_OTHERS.sub("", file.read_text())
    yield from ((text.count("\n", 0, m.start()) + 1, m[0]) for m in WORDS.finditer(text))
    if file.suffix == ".py":
        for number, line in enumerate(text.splitlines(), start=1):
            if found := NAMES.search(line.split("#")[0]):
                yield number, found[0]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_words_of_the_first_pages_are_the_fields(name):
    assert [] == list(replaced_in(ROOT / name))


def test_a_word_that_was_replaced_is_found():
    assert WORDS.search("the run goes on")
    assert WORDS.search("a training that goes\n    on")
    assert WORDS.search("_fold(how)")
    assert NAMES.search("mine = 1")
    assert not WORDS.search("unfolded lawn")
