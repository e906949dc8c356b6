"""Tables in Markdown, and the places in the pages that have them."""

import pytest

from bigbatch.errors import RunError
from studies.results.markdown import fill, markdown_table

PAGE = (
    "# A\n\n<!-- results: a -->\nold\n\n<!-- end -->\ntext\n<!-- results: b-2 -->\n<!-- end -->\n"
)
TABLES = {"a": "| \\1 | \\g<name> |", "b-2": "two\n\nlines", "unused": "no"}


def test_every_place_has_its_table_and_the_rest_stays():
    filled = fill(PAGE, TABLES)
    assert (
        "# A\n\n<!-- results: a -->\n| \\1 | \\g<name> |\n<!-- end -->\ntext\n"
        "<!-- results: b-2 -->\ntwo\n\nlines\n<!-- end -->\n"
    ) == filled
    assert filled == fill(filled, TABLES)
    assert "no place\n" == fill("no place\n", TABLES)


def test_a_place_without_a_log_is_named():
    with pytest.raises(RunError, match="there is no log for a, b-2"):
        fill(PAGE, {})


@pytest.mark.parametrize(
    "page",
    [
        "<!-- results: a -->\nold\n",
        "<!-- results: a -->\nlost\n<!-- results: b-2 -->\n<!-- end -->\n",
        "<!-- results: a --> \nold\n<!-- end -->\n",
        "<!-- results: two words -->\nold\n<!-- end -->\n",
    ],
)
def test_a_place_that_would_be_left_out_or_take_others_along_is_an_error(page):
    with pytest.raises(RunError, match="write each place as"):
        fill(page, TABLES)


def test_a_table_has_the_columns_of_its_first_row_in_their_order():
    rows = [{"a": "1", "b": "2"}, {"b": "4", "a": "3"}]
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |" == markdown_table(rows)
    assert "None were made." == markdown_table([])
    with pytest.raises(KeyError, match="b"):
        markdown_table([{"a": "1", "b": "2"}, {"a": "3", "c": "4"}])
