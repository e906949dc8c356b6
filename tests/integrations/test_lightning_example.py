"""examples/lightning_fashion_mnist.py, run as a user would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_fashion_mnist.py"
FASHION = EXAMPLE.parent.parent.parent / "shared" / "data" / "fashion-mnist"
SECONDS = 300  # far more than needed: a hang ends as a failure


def run(logs, *options):
    """(accuracy, updates) as they were printed, and what was logged."""
    command = [sys.executable, str(EXAMPLE), "--logs", str(logs), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        cwd=logs,
        check=False,
    )
    assert 0 == result.returncode, result.stderr
    *_, last = re.findall(r"accuracy (\S+) after (\d+) updates", result.stdout)
    accuracy, updates = last
    (written,) = logs.rglob("events*")
    return float(accuracy), int(updates), EventAccumulator(str(written)).Reload()


def sizes(events):
    return {event.value for event in events.Scalars("bigbatch/batch_size")}


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.release)])
def test_on_digits(devices, tmp_path):
    accuracy, updates, events = run(tmp_path, "--devices", devices)

    assert 0.8 < accuracy
    assert 30 < updates < 100
    assert {64.0} <= sizes(events)


@pytest.mark.release
@pytest.mark.skipif(not FASHION.exists(), reason=f"{FASHION} is not there")
def test_on_fashion_mnist(tmp_path):
    accuracy, _, events = run(tmp_path, "--data", FASHION)

    assert 0.84 < accuracy
    assert 2 < max(sizes(events)) / min(sizes(events))
