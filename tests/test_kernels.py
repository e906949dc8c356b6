"""Kernels are built where there is a compiler; without one everything installs and trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bigbatch.bench import optimizers
from bigbatch.errors import SettingError
from bigbatch.kernels import native
from bigbatch.optim import LAMB, VRAdam

ROOT = Path(__file__).parent.parent
TRAINS = """
import torch
from bigbatch.bench.optimizers import path
from bigbatch.errors import SettingError
from bigbatch.optim import LARS, VRLAMB
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = VRLAMB(model.parameters(), 0.1)
for x in torch.randn(8, 5, 4):
    (model(x).square().mean() / 8).backward()
optimizer.step()
try:
    LARS(model.parameters(), fused=True)
except SettingError as error:
    print(error)
print(path())
print(model.weight.tolist())
"""


def installed(folder, compiler):
    """What a training prints with the package in `folder`, built with that compiler."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.so"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources)
    options = "-q --no-deps --no-build-isolation --no-cache-dir --disable-pip-version-check"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options.split(), "--target", folder, sources],
        check=True,
        env=os.environ | {"CC": compiler},
        capture_output=True,
    )
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{TRAINS}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    return result.stdout.splitlines()


@pytest.mark.slow
def test_without_a_compiler_it_installs_trains_and_says_so(tmp_path):
    *told, path, weights = installed(tmp_path / "without", "false")
    assert "no kernels were built" in told[0]
    assert path.startswith("torch operations (no C compiler at installation)")
    if native.library() is None:
        return
    path, with_kernels = installed(tmp_path / "with", os.environ.get("CC", "cc"))
    assert path.startswith("compiled kernels")
    expected, actual = (torch.tensor(eval(text)) for text in (weights, with_kernels))
    torch.testing.assert_close(expected, actual, rtol=1e-6, atol=1e-7)


def test_kernels_are_asked_for_where_they_are_missing_or_found():
    weights = [nn.Parameter(torch.zeros(3))]
    if native.library() is None:
        with pytest.raises(SettingError, match="no kernels were built"):
            LAMB(weights, fused=True)
    else:
        assert LAMB(weights, fused=True).param_groups[0]["fused"]
        assert VRAdam(weights, fused=True).param_groups[0]["fused"]


@pytest.mark.slow
def test_the_bench_says_the_path_and_has_a_row_for_every_optimizer(bigbatch):
    status, out, _ = bigbatch("bench", "optim", "--rounds", 1, "--over", "1 M in 16")
    assert status == 0
    for name in ("VR-SGD", "VR-Momentum", "VR-Adam", "VR-LARS", "VR-LAMB", "AdamW, torch fused"):
        assert f"| {name} " in out, name
    assert "second moment, in a real backward" in out
    assert ("compiled kernels" if native.library() else "torch operations") in out


def test_the_bench_refuses_a_list_that_it_does_not_have(bigbatch):
    status, _, err = bigbatch("bench", "optim", "--over", "2 M")
    assert status == 2
    assert "one of 1 M in 16" in err


def test_a_rows_ratios_are_time_times_speed_over_bytes():
    one = optimizers.Contestant("x", 20, list, times=[2.0, 4.0, 6.0])
    cost = optimizers.StepCost("list", one, 100, base=[1.0] * 3, in_place=[1e3] * 3, copy=[5e2] * 3)
    assert (
        "list",
        "x",
        "4000.00",
        "40",
        "20",
        "2.00 [1.00, 3.00]",
        "1.00 [0.50, 1.50]",
        "4.00 [2.00, 6.00]",
    ) == cost.row()
