"""The README's code runs, and its folders and links exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LOOP = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]


def test_the_loop_runs_and_is_twenty_lines():
    result = subprocess.run(
        [sys.executable, "-c", LOOP], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ["epoch=0", "epoch=1", "epoch=2"] == re.findall(r"epoch=\d", result.stdout)
    assert len(LOOP.splitlines()) <= 20


def test_every_folder_of_the_library_is_listed():
    listed = README.split("## Folders")[1].split("Imports go")[0]
    named = {
        name for line in listed.splitlines() for name in re.findall(r"(?:^|  )(\w+)/", line.strip())
    }
    folders = {path.parent.name for path in (ROOT / "src/bigbatch").glob("*/__init__.py")}
    assert folders - {"kernels"} == named - {"src"}


def test_every_link_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
