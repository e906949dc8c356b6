"""docs/engines.md: every cell names a test that is there, or what is said where it is refused."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "engines.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
CELLS = [(row[0], cell) for row in ROWS[1:] for cell in row[1:]]
FORM = re.compile(r'(works|refused)(, "(?P<said>[^"]+)")?: `(?P<file>\w+\.py)::(?P<test>\w+)`')


@cache
def names_in(file):
    (path,) = TESTS.rglob(file)
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


@cache
def literals():
    """All text of the library, as it is put together from neighbouring literals."""
    trees = (ast.parse(f.read_text()) for f in (TESTS.parent / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_every_engine_has_both_cells():
    assert ["engine", "similarity", "VR"] == ROWS[0]
    assert all(len(row) == 3 for row in ROWS)
    engines = " ".join(row[0] for row in ROWS)
    for name in ("one process", "DDP", "FSDP2", "HSDP", "Lightning", "HF Trainer", "Accelerate"):
        assert name in engines
    for stage in "0123":
        assert re.search(rf"DeepSpeed, stages? [0-3, ]*{stage}", engines)


@pytest.mark.parametrize(("engine", "cell"), CELLS)
def test_a_cell_says_what_a_test_has_seen(engine, cell):
    found = FORM.fullmatch(cell)
    assert found, f"{engine}: {cell}"
    assert found["test"] in names_in(found["file"])
    if found["said"]:
        assert any(found["said"] in text for text in literals())


def test_the_trajectory_is_tested():
    file, test = re.search(r"`(\w+\.py)::(\w+)`, 40 updates", PAGE).groups()
    assert test in names_in(file)
