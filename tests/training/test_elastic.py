"""Runs under torchrun that lose a worker, or wait for one: no sample lost or repeated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from numbered_samples import run, together

UPDATES = 24
SCRIPT = Path(__file__).parents[1] / "helpers" / "elastic_training.py"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # else workers that are started again find the addresses of those before them (pytorch#135712)
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
ALONE = ["--standalone", "--nproc-per-node"]


def torchrun(folder, how, **options):
    """Exit status, and what was printed; a run that stands still is ended, and fails."""
    folder.mkdir(exist_ok=True)
    arguments = [f"{name}={value}" for name, value in {"updates": UPDATES, **options}.items()]
    command = [sys.executable, "-m", "torch.distributed.run", *how, SCRIPT, folder, *arguments]
    paths = [
        str(SCRIPT.parent),
        str(SCRIPT.parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    result = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    return result.returncode, result.stdout + result.stderr


def applied(folder):
    """Samples of each update that the last weights have seen, in order; and where lives began."""
    steps, lives = {}, []
    for line in map(json.loads, (folder / "ledger").read_text().splitlines()):
        if "from" in line:
            lives.append((line["from"], line["ranks"]))
            steps = {step: done for step, done in steps.items() if step <= line["from"]}
        else:
            steps.setdefault(line["step"], []).extend(line["numbers"])
    assert list(range(1, UPDATES + 1)) == sorted(steps)
    return [sorted(steps[step]) for step in sorted(steps)], lives


@pytest.fixture(scope="module")
def undisturbed():
    """In one process: samples of every update, and the weights after the last."""
    numbers, _, weights = run(0, 1, "plain", 4, UPDATES)
    return together([(numbers,)]), weights


def assert_as_undisturbed(undisturbed, folder):
    samples, weights = undisturbed
    assert samples == applied(folder)[0]
    torch.testing.assert_close(weights, torch.load(folder / "weights.pt"), rtol=1e-9, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.release)])
def test_a_worker_killed_in_the_middle_of_a_step_costs_no_sample(undisturbed, tmp_path, engine):
    status, output = torchrun(
        tmp_path, [*ALONE, 2, "--max-restarts", 1], engine=engine, fault="kill"
    )
    assert 0 == status, output
    assert_as_undisturbed(undisturbed, tmp_path)
    assert [(0, 2), (10, 2)] == applied(tmp_path)[1]  # step 13 was never done the first time


@pytest.mark.release
def test_fewer_workers_continue_from_the_checkpoint(undisturbed, tmp_path):
    status, output = torchrun(tmp_path, [*ALONE, 2], fault="kill")
    assert 1 == status, output
    status, output = torchrun(tmp_path, [*ALONE, 1], engine="plain")
    assert 0 == status, output
    assert_as_undisturbed(undisturbed, tmp_path)
    assert [(0, 2), (10, 1)] == applied(tmp_path)[1]


@pytest.mark.release
def test_a_rank_that_starts_late_is_waited_for(undisturbed, tmp_path):
    status, output = torchrun(tmp_path, [*ALONE, 2], engine="fsdp2", fault="starts late")
    assert 0 == status, output
    assert_as_undisturbed(undisturbed, tmp_path)


@pytest.mark.release
def test_a_rank_that_stays_away_is_named_as_what_was_waited_for(tmp_path):
    status, output = torchrun(tmp_path, [*ALONE, 2], fault="stays away", timeout=15)
    assert 1 == status
    assert "bigbatch: rank 0 of 2 waited here for the others" in output
    assert "bigbatch: the ranks were to compare where the run stands" in output


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.release)])
def test_a_rank_without_memory_ends_the_run_and_is_named_with_the_size_to_set(tmp_path, engine):
    status, output = torchrun(tmp_path, [*ALONE, 2], engine=engine, fault="memory", timeout=20)
    assert 1 == status
    assert "bigbatch: this micro-batch on rank 1 of 2 had" in output
    assert "samples; set micro_batch=" in output
    assert "on every rank, or find it by bb.largest_micro_batch(" in output
