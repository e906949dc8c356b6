"""kill -9 at random steps, then --resume: the same metrics and weights, bit for bit.

With dropout, so that random states matter.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bigbatch_recipes.recipe_registry import RECIPES
from distributed_states import states_of
from dropout_digits import NAME, register

pytestmark = pytest.mark.thorough

TRAIN = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "dropout_digits.py"), "train"]
SETTINGS = [NAME, "--policy", "simigrad", "--optimizer", "vr-momentum", "--target", "0.2"]
LENGTH = ["--epochs", "3", "--max-batch", "96", "--checkpoint-every", "9 steps", "--quiet"]


def rows_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "elapsed_seconds": None} for line in lines]


def state_of(run):
    state = torch.load(run / "checkpoint.pt", weights_only=True)["state"]
    own, *rest = states_of(state["train"])
    own["own"] |= {"elapsed_seconds": None, "step_seconds": None}
    own["shared"] |= {"step_times": None}
    return state | {"train": [own, *rest]}


def assert_same(expected, actual):
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        for key in expected:
            assert_same(expected[key], actual[key])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual)
        for one, other in zip(expected, actual, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual)
    else:
        assert expected == actual


def kill_after(process, run, lines):
    """Kills the process as soon as the log has so many lines; False where it ended before."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def recipe(monkeypatch):
    """The recipe of the killed processes in this one."""
    for name in ("digits", NAME):  # restored after the test
        monkeypatch.setitem(RECIPES, name, RECIPES.get(name))
    register()


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.release)])
def test_a_run_that_is_killed_often_ends_as_if_never_killed(bigbatch, tmp_path, kills, recipe):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert 0 == bigbatch("train", *SETTINGS, *LENGTH, "--run-dir", whole)[0]
    steps = len(rows_of(whole))
    chance = random.Random(0)
    points = sorted(chance.sample(range(1, steps - 20), kills))
    killed_before_its_end = 0
    for lines in points:
        existing = (killed / "settings.json").exists()
        command = ["--resume", str(killed), "--quiet"]
        command = command if existing else [*SETTINGS, *LENGTH, "--run-dir", str(killed)]
        process = subprocess.Popen([*TRAIN, *command])
        killed_before_its_end += kill_after(process, killed, lines)
    assert kills == killed_before_its_end
    assert 0 == bigbatch("train", "--resume", killed, "--quiet")[0]
    assert rows_of(whole) == rows_of(killed)
    assert_same(state_of(whole), state_of(killed))
