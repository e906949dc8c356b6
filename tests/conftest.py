"""What several test files share."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from bigbatch.cli import main
from ranks import Ranks


def pytest_collection_modifyitems(items):
    """DeepSpeed compiles a part of itself when it is first used."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        skip = pytest.mark.skip(reason="DeepSpeed needs a C++ compiler, and there is none")
        for item in items:
            if any(name in item.nodeid for name in ("deepspeed", "one_trajectory", "ZeRO")):
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Two test processes on two cores; sums then also come in one order."""
    torch.set_num_threads(1)


@pytest.fixture
def bigbatch(monkeypatch, capsys):
    """The command, in this process: returns (exit status, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bigbatch", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as ending:
            status = ending.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def trackers():
    """W&B and MLflow remember where a process wrote first; they forget it before and after."""

    def forget():
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()
            sys.modules["wandb"].teardown()
        if "mlflow" in sys.modules:
            sys.modules["mlflow"].set_tracking_uri(None)

    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)` gives n real processes, made on first use and again after a failure."""
    pools = {}

    def of_size(count):
        if count not in pools or not pools[count].alive:
            pools[count] = Ranks(count)
        return pools[count]

    yield of_size
    for pool in pools.values():
        pool.kill()


@pytest.fixture(scope="session")
def deepspeed_ranks(ranks):
    """`ranks`, once there is what DeepSpeed compiles on first use, for up to a minute."""
    from deepspeed.accelerator import get_accelerator

    beside_python = Path(sys.executable).parent  # ninja may be there, and not on the path
    os.environ["PATH"] += os.pathsep + str(beside_python)
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    return ranks


@pytest.fixture
def fresh_ranks(deepspeed_ranks):
    """Processes of its own for a test: some of what DeepSpeed sets stays for a process's life."""
    pools = []

    def of_size(count):
        pools.append(Ranks(count))
        return pools[-1]

    yield of_size
    for pool in pools:
        pool.kill()
