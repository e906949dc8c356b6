"""Runs under torchrun that lose a worker, or wait for one: no sample lost or repeated."""

import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
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


def launched(folder, how, options, variables=None):
    """A torchrun that has begun."""
    folder.mkdir(exist_ok=True)
    arguments = [f"{name}={value}" for name, value in {"updates": UPDATES, **options}.items()]
    command = [sys.executable, "-m", "torch.distributed.run", *how, SCRIPT, folder, *arguments]
    paths = [
        str(SCRIPT.parent),
        str(SCRIPT.parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(run):
    """Exit status, and what was printed; a run that stands still is ended, and fails."""
    try:
        output, _ = run.communicate(timeout=170)
    finally:
        run.kill()
    return run.returncode, output


def torchrun(folder, how, **options):
    """The same of a torchrun from beginning to end."""
    return ended(launched(folder, how, options))


def nodes(folder, port, **options):
    """Two functions that start a node each of one elastic run: the one that stays, and another."""
    found = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=1"
    how = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.5"]
    how += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]

    def node(name):
        conf = f"--rdzv-conf={found},is_host={int(name == 'kept')}"
        return launched(folder, [*how, conf], options, {"NODE": name})

    return partial(node, "kept"), partial(node, "lost")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(folder, update):
    """Waits until an update is in the ledger."""
    ledger, end = folder / "ledger", time.monotonic() + 120
    while time.monotonic() < end:
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        if any(json.loads(line).get("step") == update for line in lines):
            return
        time.sleep(0.1)
    raise AssertionError(f"update {update} did not come")


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


@pytest.mark.thorough
def test_a_node_that_is_lost_leaves_the_run_to_the_other_without_a_sample_less(
    undisturbed, tmp_path
):
    kept, lost = nodes(tmp_path, free_port(), fault="a node is lost")
    first, second = kept(), lost()
    status, output = ended(first)
    ended(second)
    assert 0 == status, output
    assert_as_undisturbed(undisturbed, tmp_path)
    assert [(0, 2), (10, 1)] == applied(tmp_path)[1]  # steps 11 and 12 are done once more


@pytest.mark.thorough
def test_a_node_that_joins_takes_its_share_of_the_samples_that_are_left(undisturbed, tmp_path):
    kept, joining = nodes(tmp_path, free_port(), fault="a node joins")
    first = kept()
    wait_for(tmp_path, 12)
    second = joining()
    for node in (first, second):
        status, output = ended(node)
        assert 0 == status, output
    assert_as_undisturbed(undisturbed, tmp_path)
    assert [(0, 1), (10, 2)] == applied(tmp_path)[1]


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
