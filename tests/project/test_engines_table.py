"""docs/engines.md: every cell names an existing test, and the message of what is refused."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "engines.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
CELLS = [(row[0], cell) for row in ROWS[1:] for cell in row[1:]]
FORM = re.compile(r'(works|refused)(, "(?P<message>[^"]+)")?: `(?P<file>\w+\.py)::(?P<test>\w+)`')


@cache
def names_in(file):
    (path,) = TESTS.rglob(file)
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


@cache
def literals():
    """All string constants of the library, with adjacent literals joined."""
    trees = (ast.parse(f.read_text()) for f in (TESTS.parent / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_every_engine_has_two_cells():
    assert ["engine", "similarity", "VR"] == ROWS[0]
    assert all(len(row) == 3 for row in ROWS)
    engines = " ".join(row[0] for row in ROWS)
    for name in ("one process", "DDP", "FSDP2", "HSDP", "Lightning", "HF Trainer", "Accelerate"):
        assert name in engines
    for stage in "0123":
        assert re.search(rf"DeepSpeed, stages? [0-3, ]*{stage}", engines)


@pytest.mark.parametrize(("engine", "cell"), CELLS)
def test_a_cell_names_an_existing_test_and_message(engine, cell):
    found = FORM.fullmatch(cell)
    assert found, f"{engine}: {cell}"
    assert found["test"] in names_in(found["file"])
    if found["message"]:
        assert any(found["message"] in text for text in literals())


def test_the_test_of_the_trajectory_exists():
    file, test = re.search(r"`(\w+\.py)::(\w+)`,\s40\supdates", PAGE).groups()
    assert test in names_in(file)
