"""docs/developer/table-tests.md names existing tests, for every row of the tables of users."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "developer/table-tests.md").read_text()
ENGINES = (DOCS / "engines.md").read_text()
TABLE = [line.strip("| ").split(" | ") for line in ENGINES.splitlines() if line.startswith("| ")]
LISTED = [  # row, cell, cell
    re.split(r": (?=works|refused)|; (?=works|refused)", re.sub(r"\s+", " ", entry))
    for entry in PAGE.split("\n## ")[1].split("\n- ")[1:]
]
CELL = re.compile(r'(works|refused)(, "([^"]+)")?: `(?P<file>\w+\.py)::(?P<test>\w+)`')


@cache
def names_in(file):
    (path,) = TESTS.rglob(file)
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@cache
def literals():
    """All string constants of the library, with adjacent literals joined."""
    trees = (ast.parse(file.read_text()) for file in (TESTS.parent / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value for node in nodes if isinstance(node.value, str)]


def test_every_named_test_and_file_exists():
    files = {file.name: file.read_text() for file in TESTS.rglob("test_*.py")}
    defined = {
        name
        for text in files.values()
        for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    }
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) > 100
    assert [] == [name for name in named if name not in defined]
    assert [] == [name for name in re.findall(r"`(test_\w+\.py)`", PAGE) if name not in files]


def test_every_row_of_the_engines_has_its_tests():
    assert ["engine", "similarity", "VR"] == TABLE[0]
    assert TABLE[1:] == [
        [row, *(re.match(r"\w+", cell)[0] for cell in cells)] for row, *cells in LISTED
    ]


@pytest.mark.parametrize(
    ("row", "cell"), [(row, cell.removesuffix(";")) for row, *cells in LISTED for cell in cells]
)
def test_a_cell_names_an_existing_test_and_the_error(row, cell):
    found = CELL.match(cell)
    assert found, f"{row}: {cell}"
    assert found["test"] in names_in(found["file"])
    if found[3]:
        assert any(found[3] in text for text in literals())
        assert found[3] in ENGINES


def test_every_row_of_the_faults_stands_on_the_page_for_users():
    faults = re.sub(r"\s+", " ", (DOCS / "faults.md").read_text())
    entries = PAGE.split("\n## Faults")[1].split("\n- ")[1:]
    rows = [re.sub(r"\s+", " ", entry).split(": `test_")[0] for entry in entries]
    assert len(rows) > 100
    assert [] == [row for row in rows if f"- **{row}**:" not in faults]
