"""The README is short, its code runs, and its links exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DIFF = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
LOOP = "\n".join(line[1:] for line in DIFF if line[0] != "-")


def test_the_readme_is_read_in_two_minutes():
    assert len(README.splitlines()) <= 110


def test_the_loop_is_eight_lines_that_learn():
    pytest.importorskip("sklearn")
    result = subprocess.run(
        [sys.executable, "-c", LOOP], capture_output=True, text=True, check=True, cwd=ROOT
    )
    shown = re.findall(r"epoch=\d: loss (\d\.\d\d), next batch (\d+)", result.stdout)
    losses, batches = zip(*shown, strict=True)
    assert 8 == len(shown)
    assert float(losses[-1]) < float(losses[0]) / 2
    assert int(batches[-1]) > 64  # from 32
    assert min(map(int, batches)) >= 32
    printed = re.findall(r"(?m)^    epoch=(\d): loss (\d\.\d\d), next batch (\d+)$", README)
    assert ["0", "3", "7"] == [epoch for epoch, _, _ in printed]
    for epoch, loss, batch in printed:  # rounding may differ from machine to machine
        assert pytest.approx(float(loss), abs=0.1) == float(losses[int(epoch)])
        assert pytest.approx(int(batch), rel=0.5) == int(batches[int(epoch)])
    assert 8 == sum(line[0] == "+" for line in DIFF)


def test_every_link_exists():
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
