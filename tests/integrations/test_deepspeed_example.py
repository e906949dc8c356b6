"""The example of docs/deepspeed.md runs, however it is launched."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "deepspeed_fashion_mnist.py"
FASHION_MNIST = ROOT.parent / "shared" / "data" / "fashion-mnist"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
LAUNCHER = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port"]
SECONDS = 240  # far more than needed: a hang ends as a failure
ABORTED = "terminate called without an active exception"  # by gloo at exit: docs/LOG.md
TRIES = 3

pytestmark = [
    pytest.mark.usefixtures("deepspeed_ranks")  # what it compiles once would count here
]


def free_port():
    """The one of the last launch may be kept for a while."""
    with socket.socket() as opened:
        opened.bind(("", 0))
        return opened.getsockname()[1]


def epochs_of(folder, launcher, *arguments):
    """(samples, batch size, accuracy) of each epoch."""
    for _ in range(TRIES):
        port = [str(free_port())] if launcher is LAUNCHER else []
        ended = subprocess.run(
            [sys.executable, *launcher, *port, str(EXAMPLE), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if ABORTED not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr[-10_000:]
    said = re.findall(r"steps, (\d+) samples, batch (\d+), accuracy ([\d.]+)", ended.stdout)
    return [(int(samples), int(batch), float(accuracy)) for samples, batch, accuracy in said]


def assert_learnt_digits(epochs):
    assert [1500, 3000, 4500] == [samples for samples, _, _ in epochs]
    assert epochs[-1][-1] > 0.8


@pytest.mark.release
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "launcher", [pytest.param(TORCHRUN, id="torchrun"), pytest.param(LAUNCHER, id="deepspeed")]
)
def test_it_runs_on_two_ranks_by_either_launcher(launcher, stage, tmp_path):
    assert_learnt_digits(epochs_of(tmp_path, launcher, "--stage", stage))


@pytest.mark.release
def test_it_learns_fashion_mnist_in_one_epoch_on_two_ranks(tmp_path):
    if not FASHION_MNIST.exists():
        pytest.skip(f"{FASHION_MNIST} is not there")
    options = ["--data", FASHION_MNIST, "--epochs", 1]
    ((samples, batch, accuracy),) = epochs_of(tmp_path, TORCHRUN, *options)
    assert samples == 60_000
    assert batch > 64
    assert accuracy > 0.8
