"""The trainer of examples/torchtitan, on torchtitan's, with FSDP2 on 2 ranks."""

import json
from math import sqrt
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from torchrun import torchrun

SCRIPT = Path(__file__).parent / "scripts" / "titan_on_cpu.py"
START, QUANTUM, RATE, WARM_UP = 128, 64, 1e-3, 4  # tokens of the first step, of one backward


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    result = torchrun(2, SCRIPT, tmp_path_factory.mktemp("titan"))
    lines = [line for line in result.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, result.stderr
    return json.loads(lines[0].removeprefix("ANSWER "))


def test_a_batch_that_stays_is_torchtitans_own_training(answer):
    assert 0 == answer["fixed"]  # largest difference of a weight


def test_backwards_follow_the_decisions_and_rates_are_scaled_in_the_step_alone(answer):
    steps = answer["scheduled"]
    assert [2, 2, 4, 8, 16, 16] == [step["accumulation"] for step in steps]
    assert [128, 256, 512, 1024, 1024, 1024] == [step["next"] for step in steps]
    scheduled = [RATE / WARM_UP, *(step["lr_after"] for step in steps)]
    for step, lr in zip(steps, scheduled, strict=False):
        factor = sqrt(step["accumulation"] * QUANTUM / START)
        assert pytest.approx(factor * lr) == step["lr"]
    assert pytest.approx([RATE * k / WARM_UP for k in (2, 3, 4)]) == scheduled[1:4]


@pytest.mark.parametrize("case", ["errors", "masked", "chunked", "replicated", "bfloat16"])
def test_statistics_are_those_of_whole_gradients_in_one_process(answer, case):
    """Relative errors; also with unequal tokens, a loss of several backwards, whole copies."""
    assert answer[case]
    tolerance = 1e-2 if case == "bfloat16" else 1e-5
    for signal, noise in answer[case]:
        assert signal < tolerance
        assert noise < tolerance


def test_a_resumed_training_is_the_whole_one(answer):
    steps, resumed = answer["steps"], answer["resumed_steps"]
    assert 3 == steps[-1]["accumulation"]  # the batch has grown
    assert steps[-len(resumed) :] == resumed
    assert 0 == answer["resumed"]


def test_what_cannot_be_measured_is_refused(answer):
    refused = answer["refused"]
    assert "disable_cuda_graphs" in refused["graphs"]
    assert "ranks must be data-parallel alone" in refused["ranks"]
    assert "counts samples and the training tokens" in refused["samples"]
    assert "needs the loop of AdaptiveBatch" in refused["policy"]
