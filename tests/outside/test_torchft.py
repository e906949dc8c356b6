"""The loop of examples/torchft: replicas that are killed and return, steps that do not count."""

import json
import subprocess
import sys
from itertools import pairwise
from math import isfinite
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchft")
import torchft
from torchft.coordination import LighthouseServer

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.optim import VarianceReduced

sys.path.append(str(Path(__file__).parents[2] / "examples" / "torchft"))
from adaptive_replicas import committed_steps

SCRIPT = Path(__file__).parent / "scripts" / "torchft_replica.py"
SECONDS, MICRO, LARGEST = 120, 4, 64


@pytest.fixture
def lighthouse():
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=500,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=2000,
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def start(lighthouse, tmp_path):
    """Starts a replica that ends after so many steps together with another."""
    replicas = []

    def run(number, fault="", lasts=4):
        log = tmp_path / f"{len(replicas)}.log"  # a pipe that nobody reads would fill up
        command = [sys.executable, SCRIPT, lighthouse, number, fault, lasts]
        with log.open("w") as file:
            process = subprocess.Popen([*map(str, command)], stdout=file, stderr=file)
        replicas.append(process)
        return process, log

    yield run
    for process in replicas:
        process.kill()
        process.wait()


def rows_of(replica):
    """The steps of a replica that has ended, by their number; its exit status."""
    process, log = replica
    status = process.wait(timeout=SECONDS)
    lines = log.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"steps"')]
    return {row["steps"]: row for row in rows}, status


def assert_successive(rows):
    """A replica has each step that counts once, from its first one on."""
    assert [*range(min(rows), min(rows) + len(rows))] == sorted(rows)


def assert_agree(rows, others):
    """Steps that both replicas took together are the same; statistics are the mean over both."""
    together = [steps for steps in rows.keys() & others.keys() if rows[steps]["plan"][0] == 2]
    assert together
    for steps in together:
        one, other = rows[steps], others[steps]
        for name in ("plan", "measured", "next", "weights"):
            assert one[name] == other[name], (steps, name)
        mean = [(a + b) / 2 for a, b in zip(one["own"], other["own"], strict=True)]
        assert pytest.approx(mean, rel=1e-9) == one["measured"]
    return together


def test_a_killed_replica_returns_and_decides_as_the_others(start):
    staying, dying = start(0), start(1, "killed")
    killed, status = rows_of(dying)
    assert -9 == status
    returned, status = rows_of(start(1, lasts=2))
    assert 0 == status
    rows, status = rows_of(staying)
    assert 0 == status
    assert_agree(rows, killed)
    assert max(killed) < min(assert_agree(rows, returned))  # with the state of those that stayed
    assert_successive(rows)
    assert {1, 2} <= {row["plan"][0] for row in rows.values()}
    assert {0.05} == {row["lr"] for row in rows.values()}
    for row, following in pairwise(rows[steps] for steps in sorted(rows)):
        replicas, _, size = following["plan"]  # the batch does not follow their number
        assert abs(size - row["next"]) <= replicas * MICRO / 2
        assert min(row["next"] + 1, LARGEST) <= following["next"]


def test_a_step_that_is_not_finite_counts_on_no_replica(start):
    replicas = [start(0), start(1, "nan")]
    (rows, status), (others, other_status) = map(rows_of, replicas)
    assert (0, 0) == (status, other_status)
    assert_agree(rows, others)
    assert_successive(rows)
    assert_successive(others)
    assert all(isfinite(row["weights"]) for row in rows.values())


def test_a_policy_that_reads_more_than_statistics_is_refused():
    model = torch.nn.Linear(2, 1)
    controller = bb.Controller(bb.Goodput(), 32)
    with pytest.raises(ValueError, match="needs the loop of AdaptiveBatch"):
        next(committed_steps(model, None, None, None, controller, micro=4))


def test_its_optimizer_is_refused_with_this_loop_as_the_remedy():
    model = torch.nn.Linear(2, 1)
    manager = None  # asked by step() and zero_grad() alone
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SettingError, match=r"OptimizerWrapper decides .* examples/torchft"):
        bb.AdaptiveBatch(model, optimizer, [torch.zeros(4, 2)], policy=bb.Fixed(4))
    with pytest.raises(SettingError, match="OptimizerWrapper is a wrapper"):
        VarianceReduced(optimizer)
