"""SimiGrad's own CIFAR script: its fork of DeepSpeed becomes the release, by one line."""

import json
import re
from math import sqrt
from pathlib import Path

import pytest

from script_edits import edited, typed
from torchrun import torchrun

SCRIPT = Path(__file__).parent / "scripts" / "simigrad_cifar.py"
LOWEST, HIGHEST, TARGET, BATCH = 32, 256, 0.4, 32

ADAPTIVE = """
-import deepspeed
 import torch
+from bigbatch.integrations import deepspeed
...
-            optimizer.zero_grad()
"""
EVERY_STEP = f"""{ADAPTIVE}...
         optimizer=optimizer,
+        every=1,
"""

pytestmark = pytest.mark.usefixtures("deepspeed_ranks")  # what it compiles once would count here


def train(folder, script, ranks):
    """What every update printed, a dictionary a line; the accuracy of each epoch."""
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 4 // ranks,
        "zero_allow_untested_optimizer": True,
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    settings = {
        "deepspeed_config": folder / "ds_config.json",
        "similarity_target": TARGET,
        "batch_size_lower_bound": LOWEST,
        "batch_size_upper_bound": HIGHEST,
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    run = torchrun(ranks, script, "--deepspeed", *given)
    assert 0 == run.returncode, run.stderr
    lines = re.findall(r"^step (.*)$", run.stdout, flags=re.MULTILINE)
    updates = [dict(pair.split("=") for pair in line.split()) for line in lines]
    accuracies = [float(said) for said in re.findall(r"accuracy ([\d.]+)", run.stdout)]
    return [{k: float(v) for k, v in row.items()} for row in updates], accuracies, run.stdout


def test_the_edit_is_one_line_and_one_less():
    """zero_grad() before every micro-batch leaves the last one alone: a mistake of the original."""
    assert 1 == typed(ADAPTIVE)


@pytest.mark.parametrize("edit", [ADAPTIVE, EVERY_STEP], ids=["default", "every step"])
@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_and_its_readings_are_those_of_the_paper(tmp_path, processes, edit):
    updates, accuracies, said = train(tmp_path, edited(SCRIPT, edit, tmp_path), processes)
    assert len(updates) > 20
    sizes = [row["adjusted_batch_size"] for row in updates]
    assert all(LOWEST <= size <= HIGHEST for size in sizes)
    assert len(set(sizes)) > 3
    for before, row in zip(sizes, updates, strict=False):
        moved = row["adjusted_batch_size"] - before
        assert abs(moved) <= max(0.2 * before, 4 * processes)
    for row in updates:  # the rate of the batch that is to come, from .05 for the first
        epoch_rate = 0.05 if row["epoch"] < 2 else 0.005
        assert row["adjusted_learning_rate"] == pytest.approx(
            epoch_rate * sqrt(row["adjusted_batch_size"] / BATCH), rel=0.15
        )
    assert accuracies[-1] > 0.8  # .1 by a predict
    assert "batch size" in said  # verbose
