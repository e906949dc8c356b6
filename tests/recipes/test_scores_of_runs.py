"""Scores of trainings: when they are measured, how they are timed and compared."""

import json
import time
from dataclasses import replace
from statistics import fmean, median

import pytest

from bigbatch.log.history import history_of
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.train_run import Training
from clock import Clock

ACCURACY = "test accuracy, %"


def test_the_seconds_include_earlier_evaluations_and_not_their_own(tmp_path, monkeypatch):
    """A forward of the evaluation takes 1,000 seconds, one of the training takes one."""
    clock = Clock(0, 0)
    monkeypatch.setattr(time, "perf_counter", clock)

    def model(settings):
        network = DIGITS.model(settings)
        network.register_forward_pre_hook(
            lambda module, _: setattr(clock, "now", clock.now + (1 if module.training else 1000))
        )
        return network

    settings = DIGITS.settings().with_changes(
        {"policy": "fixed", "samples": 96, "epochs": 3, "batch_size": 32}
    )
    run = RunDirectory.create(tmp_path / "run", settings.as_dict())
    training = Training(replace(DIGITS, model=model), settings)
    training.train_epochs(run, LiveView(quiet=True), "run")
    first, second, third = (one["elapsed_seconds"] for one in history_of(run.path).scored_rows)
    assert 0 < first < 1000 <= second < third
    assert (second - first) // 1000 == (third - second) // 1000 >= 1  # forwards of an evaluation


@pytest.mark.thorough
def test_trainings_of_the_command_are_evaluated_and_timed_every_so_many_samples(bigbatch, tmp_path):
    """Each evaluation ends a step that passes a multiple of 0.1K samples, or the training."""
    reached = []
    arguments = ("--arm", "fixed-32", "--samples", 300, "--epochs", 2)
    arguments = (*arguments, "--evaluate-every", "0.1K samples", "--quiet")
    for seed in (0, 1, 2):
        run = tmp_path / f"seed{seed}"
        assert 0 == bigbatch("train", "digits", *arguments, "--seed", seed, "--run-dir", run)[0]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        expected = [
            one["step"]
            for one in rows
            if one["samples"] // 100 > (one["samples"] - one["batch_size"]) // 100
        ]
        evaluations = [one for one in rows if one["metrics"] is not None]
        assert expected == [one["step"] for one in evaluations]
        assert 6 == len(evaluations)
        reached.append(next(one for one in evaluations if one["metrics"][ACCURACY] >= 10))
    status, out, _ = bigbatch("compare", *tmp_path.iterdir(), "--to", "10", "--to", "101")
    assert 0 == status
    table = " ".join(out.partition("first evaluation")[2].split())
    assert "at least 10 3 of 3" in table
    assert "at least 101 0 of 3 never never never" in table
    for name in ("step", "samples"):
        assert f"{median(one[name] for one in reached):,}" in table


@pytest.mark.thorough
def test_trainings_of_the_command_are_paired_by_their_seeds(bigbatch, tmp_path):
    runs, last = [], {}
    for arm in ("fixed-32", "simigrad"):
        for seed in (0, 1):
            run = tmp_path / f"{arm}-{seed}"
            arguments = ("--arm", arm, "--seed", seed, "--samples", 300, "--epochs", 1)
            assert 0 == bigbatch("train", "digits", *arguments, "--run-dir", run, "--quiet")[0]
            rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
            last[arm, seed] = rows[-1]["metrics"][ACCURACY]
            runs.append(run)
    status, out, _ = bigbatch("compare", *runs)
    assert 0 == status
    expected = fmean(last["simigrad", seed] - last["fixed-32", seed] for seed in (0, 1))
    assert f"{expected:+.2f} " in out.partition("difference from")[2]
