"""What all tests share: processes, the command, the choice of tests, the summary."""

import gc
import os
import re
import shutil
import sys
import warnings
from importlib import import_module

import pytest
import torch

import extras
from areas import report_areas
from bigbatch.cli import main
from bigbatch.kernels import native
from deepspeed_operations import compile_deepspeed, keep_compiled
from property_tests import try_fewer
from ranks import forking, ranks_of
from studies.simulated_device import NAME, compiled_library, simulated_device
from tiers import THOROUGH, is_on_deepspeed, is_on_ranks, mark_products

FIRST_CASES_ON_DEVICE = ("optim", "training")  # folders; two minutes instead of six
collect_ignore = ["tests/advisor/scripts"]  # as users write them; tests start them


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", NAME), default="cpu", help="of tensors by default")


def pytest_configure(config):
    if config.option.device == NAME:
        try:
            simulated_device()
        except RuntimeError as error:
            pytest.exit(f"no test runs on the simulated device: {error}", returncode=0)
        torch.set_default_device(NAME)
    config.pluginmanager.register(extras)  # for src/ too, which this file's own hooks do not reach
    torch.set_num_threads(1)  # the test processes share the cores; sums also come in one order
    keep_compiled()
    with warnings.catch_warnings(action="ignore"):
        native.fits([torch.zeros(1)])  # warns once where kernels are missing; not within a test
    if f"not {THOROUGH}" in config.option.markexpr:
        try_fewer()


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(config, items):
    on_device = config.option.device == NAME
    for item in items:
        if on_device and item.path.parent.name in FIRST_CASES_ON_DEVICE:
            item.add_marker("late")
    mark_products(items)
    if on_device:  # which other processes do not have
        others = [one for one in items if is_on_ranks(one) or one.get_closest_marker("cpu")]
        items[:] = [item for item in items if item not in others]
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        skip = pytest.mark.skip(reason="DeepSpeed needs a C++ compiler")
        for item in items:
            if is_on_deepspeed(item):
                item.add_marker(skip)
    items.sort(key=lambda item: not is_on_ranks(item))  # the long tests first


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test that needs what the device does not have: recurrent cells, sparse tensors."""
    try:
        return (yield)
    except NotImplementedError as error:
        if item.config.option.device == NAME and re.search(r"from the '(Sparse)?sim'", str(error)):
            pytest.skip(str(error).partition(".")[0])
        raise


def pytest_collection_finish(session):
    """Starts the server of processes, after the packages that it imports.

    What all tests share is frozen: a garbage collection of it takes 0.3 s.
    """
    if any(is_on_deepspeed(item) for item in session.items):
        import_module("deepspeed")
    if any(is_on_ranks(item) or item.path.parent.name == "studies" for item in session.items):
        forking()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    report_areas(terminalreporter)


@pytest.fixture
def bigbatch(monkeypatch, capsys):
    """Runs the command in this process; returns (exit status, standard output, standard error)."""

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
    """Resets W&B and MLflow, which remember where a process wrote first."""

    def reset():
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()
            sys.modules["wandb"].teardown()
        if "mlflow" in sys.modules:
            sys.modules["mlflow"].set_tracking_uri(None)

    reset()
    yield
    reset()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)(function, *arguments)` calls the function in n new processes."""
    return ranks_of


@pytest.fixture(scope="session")
def on_simulated_device(ranks):
    """`on_simulated_device(function, *arguments)` calls it in a new process with the device."""
    try:
        compiled_library()
    except RuntimeError as error:
        pytest.skip(str(error))
    return lambda function, *arguments: ranks(1)(function, *arguments)[0]


@pytest.fixture(scope="session")
def deepspeed_ranks(ranks):
    """`ranks`, after DeepSpeed has compiled what it compiles on first use."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    compile_deepspeed()
    return ranks
