"""The examples run, on generated data and on the data sets of their names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
EXAMPLES = {
    "transformers_wikitext": ("wikitext-2", r"'eval_loss': '?(\d\.\d+)", 4.5),
    "accelerate_fashion_mnist": ("fashion-mnist", r"epoch \d+: .*loss (\d\.\d+)", 1.0),
}


def run(name, folder, tmp_path, *arguments):
    """Runs an example; returns the last loss that it prints."""
    out = ["--out", str(tmp_path)] if name.startswith("transformers") else []
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", "--data", folder, *out, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return float(re.findall(EXAMPLES[name][1], result.stdout)[-1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["accelerate_fashion_mnist", pytest.param("transformers_wikitext", marks=pytest.mark.release)],
)
def test_an_example_learns_without_its_data_set(name, tmp_path):
    few = ("--samples", "500", "--epochs", "1" if name.startswith("transformers") else "4")
    assert run(name, tmp_path / "nothing", tmp_path, *few) < EXAMPLES[name][2]


@pytest.mark.release
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_on_its_data_set(name, tmp_path):
    folder = SHARED / EXAMPLES[name][0]
    if not folder.exists():
        pytest.skip(f"{folder} does not exist")
    assert run(name, folder, tmp_path) < EXAMPLES[name][2]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_on_a_page(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 80
