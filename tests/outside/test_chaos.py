"""A run that is killed before random operations on its files ends as if it never had been.

tests/runs kills between updates; here a kill falls into the writing of the configuration, of a
row, of a checkpoint, of a report, too.
"""

import json
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from dropout_digits import NAME
from torchrun import run

DYING = Path(__file__).parent / "scripts" / "dying.py"
SETTINGS = [NAME, "--policy", "simigrad", "--optimizer", "vr-momentum", "--target", "0.2"]
LENGTH = ["--epochs", "3", "--max-batch", "96", "--checkpoint-every", "9 steps", "--quiet"]
KILLS = 12


def train(folder, kill_before=0):
    """Begins or resumes a run; whether it came to its end."""
    begun = (folder / "settings.json").exists()
    arguments = ["--resume", folder] if begun else [*SETTINGS, *LENGTH, "--run-dir", folder]
    ended = run(sys.executable, DYING, folder, kill_before, "train", *arguments, "--quiet")
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode == 0


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "elapsed_seconds": None} for line in lines]


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [tensor for part in parts for tensor in tensors_of(part)]
        if isinstance(value, (dict, list, tuple))
        else []
    )


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_before_any_operation_on_its_files_ends_as_if_never_killed(tmp_path, seed):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(whole)
    operations = int(Path(f"{whole}.operations").read_text())
    chance, kills = random.Random(seed), 0
    for _ in range(KILLS):
        kills += not train(killed, kill_before=chance.randint(1, operations // 4))
    assert kills > KILLS // 3
    assert train(killed)
    assert rows_of(whole) == rows_of(killed)
    expected, actual = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
        for folder in (whole, killed)
    )
    for one, other in zip(tensors_of(expected), tensors_of(actual), strict=True):
        assert torch.equal(one, other)
