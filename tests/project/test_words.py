"""The library's own words are the field's: docs/decisions/0015."""

import re
from pathlib import Path

import pytest

import bigbatch

SOURCE = Path(bigbatch.__file__).parent
PLAIN = ("gradients", "statistics", "policies", "data", "optim", "training")
REPLACED = (  # by the term that a user would search for
    r"anew|besides?|whence|thereof|go(?:es|ing)? on|went on|told|the house|the door|"
    r"fold(?:s|ed|ing)?|pieces?|pictures?|guess(?:es|ed)?|laws?|twins?|tail|dealt|borrow(?:s|ed|ing)?|"
    r"what joins the ranks|how well its gradient is known"
)
WORDS = re.compile(rf"(?<![A-Za-z])(?:{REPLACED})(?![A-Za-z])", re.IGNORECASE)
NAMES = re.compile(r"(?<![\w\"'`])(mine|here|there|everywhere|held|of_sum)(?=\s*(?:=[^=]|\.\w|\())")
KERNEL = "native.Rule.FOLD"


@pytest.mark.parametrize("folder", PLAIN)
def test_the_words_of_a_folder_are_the_fields(folder):
    found = [
        f"{file.relative_to(SOURCE)}:{number}: {line.strip()}"
        for file in sorted((SOURCE / folder).rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if WORDS.search(line.replace(KERNEL, "")) or NAMES.search(line.split("#")[0])
    ]
    assert not found, "\n".join(found)


def test_a_word_that_was_replaced_is_found():
    assert WORDS.search("the run goes on")
    assert WORDS.search("_fold(how)")
    assert NAMES.search("mine = 1")
    assert not WORDS.search("unfolded lawn")
