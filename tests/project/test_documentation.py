"""Every code block of the pages runs; prose, tables and languages are as a reader needs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bigbatch

pytest.importorskip("sybil")
from helpers import markdown_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HISTORY = [DOCS / "LOG.md", *(DOCS / "decisions").glob("*.md")]
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
PROOF = DOCS / "known-answers.md"  # names the test of each published number
FOR_USERS = [page for page in PAGES if page not in HISTORY and "developer" not in page.parts]
LANGUAGES = {*markdown_page.EVALUATORS, "text"}
FENCE = re.compile(r"(?m)^ *```(.*)\n[\s\S]*?^ *```$")
QUICK = ("README.md", "start.md", "loops.md", "choose.md")  # in `make test`


def name_of(page):
    return str(page.relative_to(ROOT))


def with_marks(page):
    """Most pages run in `make test-all`; those on DeepSpeed need its compiled operations."""
    blocks = "".join(match[0] for match in FENCE.finditer(page.read_text()))
    marks = [pytest.mark.thorough] * (page.name not in QUICK)
    uses_deepspeed = re.search(r"integrations(\.| import )deepspeed", blocks)
    marks += [pytest.mark.deepspeed] * bool(uses_deepspeed)
    return pytest.param(page, marks=marks, id=name_of(page))


@pytest.mark.parametrize(
    "page", [with_marks(page) for page in PAGES if FENCE.search(page.read_text())]
)
def test_every_block_of_a_page_runs(page, tmp_path):
    result = subprocess.run(
        [sys.executable, markdown_page.__file__, page],
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_names_a_language_that_is_checked(page):
    assert {match[1] for match in FENCE.finditer(page.read_text())} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_is_at_most_120_columns_wide(page):
    text = FENCE.sub("", page.read_text())
    wide = [line for line in text.splitlines() if len(line) > 120 and line[:2] != "| "]
    assert [] == [line for line in wide if not line.startswith("    ")]  # code


@pytest.mark.parametrize("page", FOR_USERS, ids=name_of)
def test_cells_are_at_most_80_characters_wide(page):
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [] == [cell for cell in cells if len(re.sub(r"\]\([^)]*\)", "]", cell)) > 80]


@pytest.mark.parametrize("page", [one for one in FOR_USERS if one != PROOF], ids=name_of)
def test_pages_for_users_name_no_test(page):
    assert [] == re.findall(r"`test_\w+_\w+(?:\.py)?`|`tests/[^`]+`", page.read_text())


def test_every_public_name_is_in_the_api_reference():
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"(?m)^::: bigbatch\.(?:optim\.)?(\w+)$", pages)
    expected = {*bigbatch.__all__, *bigbatch.optim.__all__} - {"BigbatchError"}
    assert sorted(expected) == sorted(set(listed) - {"errors"})
