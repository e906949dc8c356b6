"""The examples run for anybody, without arguments and data, and on the data sets of their names."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
FILES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs/examples.md").read_text()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SECONDS = 300  # far more than needed: a hang ends as a failure


class Example(NamedTuple):
    """What an example prints: a number that falls or rises, and its bound after the training."""

    shown: str
    at_most: float = 1.0
    at_least: float = 0.0
    data: str | None = None


ACCURACY = r"accuracy (\d\.\d+)"
EXAMPLES = {
    "accelerate_fashion_mnist": Example(ACCURACY, at_least=0.8, data="fashion-mnist"),
    "deepspeed_fashion_mnist": Example(ACCURACY, at_least=0.8, data="fashion-mnist"),
    "digits": Example(ACCURACY, at_least=0.9),
    "digits_adaptive": Example(ACCURACY, at_least=0.9),
    "lightning_fashion_mnist": Example(ACCURACY, at_least=0.8, data="fashion-mnist"),
    "transformers_wikitext": Example(r"'loss': '?(\d\.\d+)", at_most=3.5, data="wikitext-2"),
}
DATA_SETS = [name for name, example in EXAMPLES.items() if example.data]


def marked(names):
    deepspeed = pytest.mark.deepspeed
    return [pytest.param(x, marks=deepspeed if x.startswith("deepspeed") else ()) for x in names]


def printed_by(name, folder, *arguments, launcher=()):
    result = subprocess.run(
        [sys.executable, *launcher, ROOT / "examples" / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def assert_learnt(name, printed):
    example = EXAMPLES[name]
    first, *_, last = map(float, re.findall(example.shown, printed))
    assert example.at_least < last < example.at_most
    assert first <= last if example.at_least else last < first


@pytest.mark.thorough
@pytest.mark.parametrize("name", marked(EXAMPLES))
def test_an_example_learns_without_arguments_in_an_empty_folder(name, tmp_path):
    printed = printed_by(name, tmp_path)
    assert_learnt(name, printed)
    expected = [f"data/{EXAMPLES[name].data}"] if EXAMPLES[name].data else []
    assert expected == re.findall(r"No \S+ in (\S+): training on ", printed)


@pytest.mark.release
@pytest.mark.parametrize("name", marked(DATA_SETS))
def test_an_example_learns_on_its_data_set(name, tmp_path):
    folder = SHARED / EXAMPLES[name].data
    if not folder.exists():
        pytest.skip(f"{folder} does not exist")
    printed = printed_by(name, tmp_path, "--data", folder)
    assert_learnt(name, printed)
    assert "training on" not in printed


@pytest.mark.release
@pytest.mark.parametrize("name", ["accelerate_fashion_mnist", "transformers_wikitext"])
def test_an_example_learns_on_two_processes(name, tmp_path):
    printed = printed_by(name, tmp_path, launcher=TORCHRUN)
    assert_learnt(name, printed)
    assert 1 == printed.count(": training on ")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_fits_on_a_page_and_names_no_folder_of_developers(file):
    code = file.read_text()
    assert len(code.splitlines()) < 80
    assert "shared" not in code


def test_every_example_is_tested():
    assert {*EXAMPLES, "fashion_mnist"} == {file.stem for file in FILES}


def test_the_page_of_examples_lists_and_includes_every_file():
    names = [file.name for file in FILES]
    assert names == sorted(re.findall(r"(?m)^## (\S+\.py)$", PAGE))
    assert names == sorted(re.findall(r"(?m)^--8<--\nexamples/(\S+)\n--8<--$", PAGE))
