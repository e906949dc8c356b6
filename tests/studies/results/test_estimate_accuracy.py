"""The log, tables and figure of a made log say what was put in."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bigbatch import GradientStatistics, NoiseScale
from made_records import made_record
from studies.results import estimate_accuracy
from studies.results.estimate_log import (
    BRANCH_STEPS,
    SEEDS,
    fixed_arms,
    measures,
    policy_arms,
    train,
)
from studies.results.tracked_training import Arm, Tracked, Truth

STEPS = 200


def tracked(arm, signal_factor, noise_factor, negative=()):
    """A training whose true signal falls by a hundredth a step; noise is 100."""
    signals = [math.exp(-0.01 * n) for n in range(STEPS)]
    truth = Truth(
        list(range(STEPS)),
        [GradientStatistics(signal, 100.0, 9, 9) for signal in signals],
        [0.05] * STEPS,
    )
    records = []
    for n, signal in enumerate(signals):
        estimate = -signal if n in negative else signal * signal_factor
        statistics = GradientStatistics(estimate, 100 * noise_factor, 128, 4)
        records.append(made_record(128, statistics=statistics))
    return Tracked(arm, records, truth)


def test_errors_of_a_step_are_those_that_were_put_in():
    step = measures(tracked(fixed_arms()[1], 1.25, 1.1))["step"]
    assert (0.25, 0.1) == (step["signal"], step["noise"])
    assert pytest.approx(math.log(1.1 / 1.25), rel=1e-3) == step["scale_bias"]
    assert (0, STEPS - 40) == (step["failures"], step["compared"])
    assert step["scale_scatter"] < 1e-10
    assert 0 < step["similarity_bias"] < 0.05


def test_steps_without_a_positive_signal_are_counted_and_left_out():
    step = measures(tracked(fixed_arms()[1], 1.0, 1.0, negative=(50, 60)))["step"]
    assert 2 == step["failures"]
    assert step["scale_scatter"] < 1e-10
    assert step["signal"] < 0  # it has them


def test_an_average_is_late_and_so_it_is_biased_where_the_noise_scale_rises():
    averages = measures(tracked(fixed_arms()[1], 1.0, 1.0))["averages"]
    assert {"16 steps", "auto"} == set(averages)
    error = averages["16 steps"]["estimate"]
    age = math.exp(-1 / 16) / (1 - math.exp(-1 / 16))  # of an average over 16 steps, and a step
    assert pytest.approx(-0.01 * age, abs=0.02) == error["bias"]
    assert error == averages["16 steps"]["exact"]


def test_the_batch_is_compared_with_that_of_the_truth():
    arm = Arm(NoiseScale(1.0), 4, "16 steps")
    run = tracked(arm, 1.0, 1.0)
    oracle = run.followed(run.centered(), averages=False)
    doubled = [
        replace(one, target_batch_size=2 * size)
        for one, size in zip(run.records, oracle, strict=True)
    ]
    batch = measures(replace(run, records=doubled))["batch"]
    assert pytest.approx(math.log(2), rel=1e-3) == batch["estimate"]["bias"]
    assert batch["exact"]["bias"] < 0


def tracking(bias, scatter, lag):
    one = {
        "bias": bias,
        "scatter": scatter,
        "rms": math.hypot(bias, scatter),
        "lag": lag,
        "failures": 1,
        "compared": 100,
    }
    return {"estimate": one, "exact": {**one, "scatter": 0.05, "lag": 3.0}}


def made_log(scatter=0.2):
    """Five seeds; the scatter of k micro-batches is scatter + .9984 / k."""
    runs = []
    for seed in SEEDS:
        for arm in (*fixed_arms(), *policy_arms()):
            own = scatter + 0.9984 / arm.micro_batches + 0.001 * seed
            is_fixed = arm in fixed_arms()
            run = {
                "seed": seed,
                "arm": arm.name,
                "steps": 3,
                "loss": 0.5,
                "truth_error": 0.04,
                "step": {
                    "signal": 0.01 * seed,
                    "noise": -0.001 * seed,
                    "similarity": 0.25,
                    "similarity_bias": 0.001 * seed,
                    "similarity_scatter": own,
                    "failures": 2,
                    "compared": 50,
                    "scale_bias": 0.1,
                    "scale_scatter": 0.6,
                },
                "averages": {"16 steps": tracking(0.01 * seed, own, 8.0 + seed % 2)},
            }
            runs.append(run if is_fixed else {**run, "batch": tracking(-0.5, own, None)})
    branches = [
        {
            "seed": seed,
            "step": step,
            "critical_batch": "inf" if seed == 0 else 200.0 + seed,
            "low": 90.0,
            "high": "inf" if seed == 0 else 400.0,
            "measured_scale": 80.0,
            "true_scale": 100.0,
            "true_error": 0.04,
            "reason": "",
        }
        for seed in SEEDS
        for step in BRANCH_STEPS
    ]
    fixed = {name: [100.0, "inf", None, 120.0] for name in ("exact", "truth", "average")}
    policy = {"truth": [64, 70, 77], "batch": [64, 66, 70]}
    example = {arm.name: policy for arm in policy_arms()[:3]}
    return {
        "data": "made",
        "seeds": list(SEEDS),
        "runs": runs,
        "branches": branches,
        "example": {fixed_arms()[1].name: fixed, **example},
        "cpu_seconds": 1,
        "wall_seconds": 1,
        "jobs": 1,
    }


def row(text, *begins):
    """The cells of the only row that begins so."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (found,) = [cells for cells in lines if cells[: len(begins)] == list(begins)]
    return found[len(begins) :]


def part(log, title):
    parts = estimate_accuracy.table(log).split("### ")
    return next(text for text in parts if text.startswith(title))


def test_the_table_of_steps():
    cells = row(part(made_log(), "One step"), "Fixed, 4 micro-batches")
    half_width = 2.776 * 0.01 * math.sqrt(2.5 / 5)  # t of four degrees of freedom
    assert f"+0.02 ({0.02 - half_width:+.2f} to {0.02 + half_width:+.2f})" == cells[0]
    assert ["0.25", "10 of 250", "tracks"] == [cells[2], cells[5], cells[6]]


def test_an_average_with_a_scatter_beyond_the_band_does_not_track():
    text = part(made_log(), "Averages")
    assert "tracks" == row(text, "Fixed, 16 micro-batches", "16 steps")[-1]
    assert "does not" == row(text, "Fixed, 2 micro-batches", "16 steps")[-1]
    assert "0.26 (0.26 to 0.27)" == row(text, "Fixed, 16 micro-batches", "16 steps")[1]


def test_a_lag_that_no_seed_has_is_counted():
    cells = row(part(made_log(), "Batch sizes"), "SimiGrad, 16 micro-batches")
    assert ["-0.50", "0.05", "none, 0 of 5 seeds", "3", "does not"] == cells[2:]


def test_paired_differences():
    text = part(made_log(), "Does k matter?")
    cells = row(text, "similarity", "Fixed, 2 micro-batches", "Fixed, 16 micro-batches")
    assert ["-0.437 (-0.437 to -0.437)", "matters"] == cells
    same = row(text, "similarity", "Fixed, 8 micro-batches", "Fixed, 8 groups")
    assert ["+0.000 (+0.000 to +0.000)", "undecided"] == same


def test_the_table_of_branch_tests():
    cells = row(part(made_log(), "Branch tests"), "50")
    assert ["100 [100, 100]", "203 [201, inf]"] == cells[:2]
    assert cells[2].startswith("+0.71 (")
    assert cells[2].endswith(", 4 of 5 seeds")
    assert ["0, 5, 0", "1", "does not"] == cells[3:]  # 2 > a factor of 2


def test_no_branch_tests_are_no_table():
    assert "None were made." in part({**made_log(), "branches": []}, "Branch tests")


def test_the_figure_has_four_panels_with_the_data():
    figure = estimate_accuracy.figure(made_log())
    assert 4 == len(figure.axes)
    scales, batches, scatter, branches = figure.axes
    (average,) = (line for line in scales.lines if line.get_label().startswith("estimate"))
    assert [100.0, 120.0] == [value for value in average.get_ydata() if math.isfinite(value)]
    assert {"SimiGrad", "NoiseScale", "Goodput"} <= {line.get_label() for line in batches.lines}
    assert 2 == len(scatter.containers)
    assert len(SEEDS) * len(BRANCH_STEPS) == len(branches.get_xticks())
    figure.canvas.draw()


def test_rule_and_hypothesis_name_the_bands():
    assert "-.22 and .22" in estimate_accuracy.RULE
    assert "ratio of 2" in estimate_accuracy.HYPOTHESIS


def test_the_page_has_the_tables_of_its_log():
    folder = Path(__file__).parents[2] / "docs" / "results"
    file = folder / "estimates.json"
    assert file.stat().st_size < 150_000
    log = json.loads(file.read_text())
    page = (folder / "estimates.md").read_text()
    missing = [
        line for line in estimate_accuracy.table(log).splitlines() if line not in page.splitlines()
    ]
    assert [] == missing
    for text in (estimate_accuracy.HYPOTHESIS, estimate_accuracy.RULE):
        assert text in page


@pytest.mark.release  # three minutes
def test_a_training_on_digits_gives_a_log_for_table_and_figure():
    log = train(None, jobs=2)
    assert log == json.loads(json.dumps(log, allow_nan=False))
    assert len(SEEDS) * 11 == len(log["runs"])
    assert "None were made." in estimate_accuracy.table(log)
    estimate_accuracy.figure(log).canvas.draw()
