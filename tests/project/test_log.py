"""docs/LOG.md: every entry names the commit and the day of its results."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_, *ENTRIES = (ROOT / "docs/LOG.md").read_text().split("\n## ")
AT = r"([0-9a-f]{7}), (\d{4}-\d{2}-\d{2})"
STAMP = re.compile(rf"Commit {AT}(?:; edited at {AT})?\.")


def stamp_of(entry):
    """Returns the (commit, day) pairs in the first line of an entry; None without them."""
    stamp = STAMP.fullmatch(entry.split("\n")[1])
    return stamp and [pair for pair in (stamp.groups()[:2], stamp.groups()[2:]) if pair[0]]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.split("\n")[0])
def test_every_entry_names_its_commit_and_its_day(entry):
    assert stamp_of(entry), "write below the heading: Commit 1234567, 2026-01-31."


def test_the_named_commits_exist_and_have_these_days():
    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout

    if "false" != git("rev-parse", "--is-shallow-repository").strip():
        pytest.skip("git or the full history is missing")
    days = dict(line.split() for line in git("log", "--abbrev=7", "--format=%h %as").splitlines())
    named = [pair for entry in ENTRIES for pair in stamp_of(entry) or ()]
    assert [] == [(commit, day) for commit, day in named if day != days.get(commit)]


def test_an_entry_without_a_commit_is_found():
    assert stamp_of("Title\nCommit 1234567, 2026-01-31.\n") == [("1234567", "2026-01-31")]
    for line in ("", "On a Monday.", "Commit 1234567.", "Commit 12, 2026-01-31.", "2026-01-31."):
        assert not stamp_of(f"Title\n{line}\n")
