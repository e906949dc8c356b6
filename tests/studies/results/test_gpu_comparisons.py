"""Comparisons for a GPU: settings, logs that are not complete, and runs that a limit stops."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from bigbatch.errors import SettingError
from bigbatch.log.atomic_files import lock_folder
from bigbatch_recipes import get_recipe
from bigbatch_recipes.console import LiveView, plain_console
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.process_pool import is_finished, train_sweep
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.sweep import Point, start_sweep
from bigbatch_recipes.validate import build_on_meta_device
from studies.results import batch_tables
from studies.results.comparison import Comparison
from studies.results.gpu_comparisons import COMPARISONS
from studies.results.questions import QUESTIONS, draw
from studies.results.run_log import LoggedRun, RunLog, log_text, read_log
from studies.results.step_cost import StepCost, measure_step_cost

COST = StepCost(0.006, 3e-5, 45_000_000)
CIFAR10, GPT = COMPARISONS
VIEW = LiveView(plain_console(), quiet=True)
DATA = Path(__file__).parents[3] / "shared/data/cifar10"


def made_run(arm, seed, score, *, lr=0.1, tuning=False):
    name = "held-out accuracy, %" if tuning else "test accuracy, %"
    curve = () if tuning else ((500, 5, 1.0, score - 3), (1000, 10, 2.0, score))
    return LoggedRun(
        arm, lr, seed, tuning, samples=1000, steps=10, scores={name: score}, curve=curve
    )


def made_log(tuned=3, shown=(), controls=None, seeds=2):
    """A log of three arms, with so many tuned ones, and runs of seed 0 of those that are shown."""
    arms = ["fixed 128", "SimiGrad .2", "fixed 512"]
    about = {
        "arms": {arm: {} for arm in arms},
        "rates": [0.1, 0.2],
        "seeds": seeds,
        "tune_seeds": 1,
    }
    if controls is not None:
        about["controls"] = {arm: {} for arm in controls}
    runs = [
        made_run(arm, 1000, 90.0 - place, lr=lr, tuning=True)
        for place, arm in enumerate(arms[:tuned])
        for lr in (0.1, 0.2)
    ]
    runs += [made_run(arm, seed, 91.0 + seed) for arm, seed in shown]
    return RunLog(about, True, COST, runs)


WHOLE = [(arm, seed) for seed in (0, 1) for arm in ("fixed 128", "SimiGrad .2", "fixed 512")]


def test_missing_runs_by_hand():
    assert {"fixed 128": 2, "SimiGrad .2": 4, "fixed 512": 4} == made_log(tuned=1).missing
    assert {"SimiGrad .2": 1, "fixed 512": 2} == made_log(
        shown=[("fixed 128", 0), ("fixed 128", 1), ("SimiGrad .2", 0)]
    ).missing
    assert {} == made_log(shown=WHOLE).missing
    assert {"replay of SimiGrad .2": 4} == made_log(
        shown=WHOLE, controls={"replay of SimiGrad .2": {}}
    ).missing
    untuned = made_log(tuned=0)
    about = {**untuned.about, "tune_seeds": 0}
    assert {4} == set(replace(untuned, about=about).missing.values())  # 2 rates, 2 seeds


@pytest.mark.parametrize("count", range(len(WHOLE) + 1))
def test_a_log_of_any_number_of_runs_is_drawn_and_counts_what_is_missing(tmp_path, count):
    log = made_log(shown=WHOLE[:count])
    (tmp_path / "results").mkdir()
    (tmp_path / "results/gpu-cifar10.json").write_text(log_text(log))
    (tmp_path / "results.md").write_text("<!-- results: gpu-cifar10 -->\n<!-- end -->\n")
    assert 2 == len(draw(tmp_path / "results"))
    page = (tmp_path / "results.md").read_text()
    assert (count == len(WHOLE)) == ("Not complete" not in page)
    if count < len(WHOLE):
        assert f"Missing runs: {len(WHOLE) - count}." in page
    begun = min(count, 3)
    assert begun == sum(f"| {arm} | 0.1" in page for arm, _ in WHOLE[:3])
    if 0 < count < 3:
        assert f"which are left out: {3 - count} of 3." in page
    assert (count == 0) == ("There is no target before fixed 128 has a run" in page)


def test_while_rates_are_tuned_there_is_no_target():
    for tuned in range(4):
        text = batch_tables.tables(made_log(tuned=tuned))
        assert "There is no target before fixed 128 has a run" in text
        assert f"Missing runs: {12 - 2 * tuned}." in text


def test_an_arm_is_compared_with_the_replay_once_it_has_a_run():
    replay = "replay of SimiGrad .2"
    begun = made_log(shown=WHOLE, controls={replay: {}})
    assert "minus its replay" not in batch_tables.tables(begun)
    runs = [*begun.runs, made_run(replay, 0, 90.0), made_run(replay, 1, 90.5)]
    text = batch_tables.tables(replace(begun, runs=runs))
    row = next(line for line in text.splitlines() if line.startswith("| SimiGrad .2 | +"))
    assert "+1.25" in row  # the mean of 91 - 90 and 92 - 90.5
    assert "minus doubling" not in text
    assert "minus fixed 128" in text


@pytest.mark.parametrize(("comparison", "parameters"), [(CIFAR10, 11_173_962), (GPT, 38_091_904)])
def test_every_arm_can_be_trained_by_its_settings(comparison, parameters):
    settings = get_recipe(comparison.recipe).settings().with_changes(comparison.settings)
    arms = comparison.arms(COST)
    points = comparison.points(arms, settings)
    assert len(arms) * len(comparison.rates) == len(points)
    assert {("cuda", "bfloat16")} == {(p.settings.device, p.settings.precision) for p in points}
    first = next(iter(arms.values()))
    assert ("fixed", settings.base_batch) == (first["policy"], first["batch_size"])
    assert comparison.name in QUESTIONS
    model = build_on_meta_device(get_recipe(comparison.recipe), points[0].settings)
    assert parameters == sum(p.numel() for p in model.parameters())


def test_the_overhead_of_goodput_is_that_of_the_timed_step():
    arms = CIFAR10.arms(COST)
    assert 200.0 == arms["Goodput, 1 device"]["overhead"]  # 6 ms / 30 us
    assert round(COST.overhead(8), 1) == arms["Goodput, 8 devices"]["overhead"]


def test_step_times_are_those_of_the_sizes_that_are_named():
    settings = DIGITS.settings().with_changes({"samples": 300})
    cost = measure_step_cost(DIGITS, settings, (8, 64, 256))
    parameters = DIGITS.model(settings).parameters()
    assert cost.gradient_bytes == sum(p.numel() * p.element_size() for p in parameters)
    assert cost.per_sample > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_stops_before_it_trains(tmp_path):
    with pytest.raises(SettingError, match="device='cuda' is not there"):
        GPT.train(tmp_path / "runs", "", 1, VIEW)
    assert [] == list((tmp_path / "runs").iterdir())


def test_a_question_that_cannot_be_resumed_refuses_a_limit(bigbatch, tmp_path):
    status, _, err = bigbatch("results", "train", "estimates", "--minutes", 1, "--logs", tmp_path)
    assert 2 == status
    assert "leave --minutes out" in err


def tiny(**changes):
    """Two arms of digits."""
    values = {
        "name": "tiny",
        "recipe": "digits",
        "settings": {"epochs": 1, "samples": 300, "held_out": 100},
        "arms": lambda _: {"fixed 32": {"policy": "fixed"}, "SimiGrad .2": {"policy": "simigrad"}},
        "rates": (0.01, 0.02),
        "seeds": 1,
        "tune_seeds": 1,
        "timed_sizes": (8, 64),
    }
    return Comparison(**values | changes)


@pytest.mark.thorough
def test_what_a_limit_leaves_is_named_and_trained_by_the_next_call(tmp_path, capsys):
    view = LiveView(plain_console(), quiet=False)
    controls = lambda _: {"replay of SimiGrad .2": {"policy": "fixed", "batch_size": 64}}  # noqa: E731
    comparison = tiny(controls=controls)
    log = comparison.train(tmp_path / "runs", "", 2, view, deadline=time.monotonic())
    assert [] == log.runs
    assert {"fixed 32": 3, "SimiGrad .2": 3} == log.missing
    assert "missing runs, which the same command trains: fixed 32: 3, SimiGrad .2: 3" in " ".join(
        capsys.readouterr().out.split()
    )
    file = tmp_path / "tiny.json"
    file.write_text(log_text(log))
    assert "There is no target" in batch_tables.tables(read_log(file))
    whole = comparison.train(tmp_path / "runs", "", 2, view)
    assert {} == whole.missing
    assert {"fixed 32", "SimiGrad .2", "replay of SimiGrad .2"} == set(whole.planned_arms)
    assert "missing" not in capsys.readouterr().out
    again = comparison.train(tmp_path / "runs", "", 2, view, deadline=time.monotonic())
    assert log_text(whole) == log_text(again)


@pytest.mark.release
def test_a_run_that_the_limit_stops_is_ended_and_resumes(tmp_path):
    path = tmp_path / "sweep"
    settings = DIGITS.settings().with_changes({"epochs": 100_000})
    start_sweep(DIGITS, path, [Point("long", {}, settings)], (), 2)
    assert {} == train_sweep(path, 1, VIEW, time.monotonic() + 20)
    first, second = path / "long-seed0", path / "long-seed1"
    assert not second.exists()
    run = RunDirectory.open(first)
    steps = len(run.log.metrics.read_text().splitlines())
    assert steps > 0
    assert not is_finished(first)
    os.close(lock_folder(run.path))  # no process trains in it
    assert {} == train_sweep(path, 1, VIEW, time.monotonic() + 20)
    assert len(run.log.metrics.read_text().splitlines()) > steps


ON_CPU = {"device": "cpu", "precision": "float32", "evaluate_every": "1 epoch", "epochs": 1}


def train_tiny(comparison, tmp_path, data, **settings):
    smaller = replace(
        comparison,
        settings={**comparison.settings, **ON_CPU, **settings},
        rates=comparison.rates[:1],
        seeds=2,
        timed_sizes=(8, 64),
    )
    return smaller.train(tmp_path / "runs", data, 2, VIEW)


def require_every_arm(log):
    assert {} == log.missing
    assert not any(run.failure for run in log.runs)
    assert 11 == len(log.planned_arms)
    text = batch_tables.tables(log)
    assert "minus its replay" in text
    batch_tables.figure(log)


@pytest.mark.release
def test_the_gpt_at_a_tiny_size_on_the_cpu(tmp_path):
    log = train_tiny(
        GPT, tmp_path, "", length=16, depth=1, heads=2, width=16, samples=1200, held_out=100
    )
    require_every_arm(log)


@pytest.mark.release
@pytest.mark.skipif(not DATA.exists(), reason="CIFAR-10 is not there")
def test_cifar10_at_a_tiny_size_on_the_cpu(tmp_path):
    log = train_tiny(
        CIFAR10, tmp_path, str(DATA), depth=10, width=4, samples=4096, held_out=500, max_batch=2048
    )
    require_every_arm(log)
