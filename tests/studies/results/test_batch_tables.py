"""Cells of the tables of a comparison, of made runs among which some failed."""

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest

from made_runs import fresh, log_of, tuning
from studies.results.batch_comparisons import CONTROLLED, DOUBLING, equal_steps, fixed, replay_of
from studies.results.batch_tables import (
    figure,
    fixed_arms,
    score_over_steps,
    tables,
    target_of,
    time_ratio,
)
from studies.results.comparison_log import LoggedRun

BASE = fixed(64)
ARMS = (BASE, fixed(256), DOUBLING, *CONTROLLED)


def made_log(changes=None, arms=ARMS):
    """Three seeds of each arm; `changes` replaces runs, by arm."""
    runs = {
        arm: [fresh(arm, seed, 89.5 + seed / 10, reached_at=40) for seed in range(3)]
        for arm in arms
    }
    runs = {**runs, **(changes or {})}
    tuned = [tuning(arm, 1000, 90.0) for arm in runs]
    return log_of(*(run for of_arm in runs.values() for run in of_arm), *tuned)


def cells(log, arm, table=0):
    """The cells of an arm by column, in one of the two tables."""
    parts = [part for part in tables(log).split("\n\n") if part.startswith("| arm")]
    lines = [line.strip("| ").split(" | ") for line in parts[table].splitlines()]
    (found,) = [line for line in lines if line[0] == arm]
    return dict(zip(lines[0], found, strict=True))


def test_the_target_is_below_the_tuned_score():
    assert 89.0 == target_of(made_log())
    assert pytest.approx(90.05) == target_of(replace(made_log(), higher_is_better=False))


def test_a_row_of_an_arm():
    spread = stdev([89.5, 89.6, 89.7])
    assert {
        "arm": DOUBLING,
        "rate": "0.1",
        "test accuracy, %": f"89.60 ± {spread:.2f}",
        "test loss": "0.5000 ± 0.0000",
        "steps": "100",
        "batch": "64",
        "reached": "3 of 3",
        "steps, samples to it": "40, 2,560",
        "time, 1 device": "1.00",
        "time, 8 devices": "1.00",
        "time, 64 devices": "1.00",
    } == cells(made_log(), DOUBLING)


def test_a_time_ratio_that_is_equal_in_every_pair_is_shown():
    twice = [fresh(DOUBLING, seed, reached_at=80) for seed in range(3)]
    assert "2.00" == cells(made_log({DOUBLING: twice}), DOUBLING)["time, 1 device"]


def test_a_failed_first_run_moves_no_column():
    failed = LoggedRun(DOUBLING, 0.1, 0, tuning=False, failure="killed by signal 9")
    log = made_log({DOUBLING: [failed, *(fresh(DOUBLING, seed, reached_at=40) for seed in (1, 2))]})
    found = cells(log, DOUBLING)
    assert ("100", "64", "2 of 3") == (found["steps"], found["batch"], found["reached"])
    assert "40, 2,560" == found["steps, samples to it"]
    assert "90.00 ± 0.00 (1 failed)" == found["test accuracy, %"]
    assert "0.5000 ± 0.0000 (1 failed)" == found["test loss"]
    assert "1.00 (2 of 3 pairs)" == found["time, 1 device"]


def test_an_arm_of_which_every_run_diverged_has_no_means():
    diverged = [fresh(fixed(256), seed, diverged=True) for seed in range(3)]
    found = cells(made_log({fixed(256): diverged}), fixed(256))
    assert ["none"] * 5 == [
        found[name]
        for name in ("test accuracy, %", "test loss", "steps", "batch", "steps, samples to it")
    ]
    assert ("0 of 3", "none") == (found["reached"], found["time, 8 devices"])


def test_a_first_arm_that_failed_stays_in_the_table_and_has_no_curve():
    failed = [LoggedRun(BASE, 0.1, seed, tuning=False, failure="killed") for seed in range(3)]
    log = made_log({BASE: failed})
    assert ("none", "0 of 3") == tuple(cells(log, BASE)[name] for name in ("steps", "reached"))
    assert [] == score_over_steps(log, (BASE, DOUBLING))


def test_curves_leave_out_runs_that_failed():
    runs = [LoggedRun(BASE, 0.1, 0, tuning=False, failure="killed"), fresh(BASE, 1), fresh(BASE, 2)]
    (panel,) = score_over_steps(made_log({BASE: runs}), (BASE, DOUBLING))
    assert [90.0, 90.0] == list(panel.series[0].y)


def test_diverged_runs_are_in_no_mean():
    runs = [fresh(DOUBLING, seed, reached_at=40) for seed in range(2)]
    bad = fresh(DOUBLING, 2, 5.0, diverged=True, steps=10_000)
    found = cells(made_log({DOUBLING: [*runs, bad]}), DOUBLING)
    assert ("100", "2 of 3") == (found["steps"], found["reached"])
    assert "90.00 ± 0.00 (1 failed)" == found["test accuracy, %"]


def test_the_pairs_of_a_ratio_are_counted_where_the_reference_lacks_one_too():
    changes = {
        fixed(256): [fresh(fixed(256), s, reached_at=at) for s, at in enumerate((10, 10, None))],
        DOUBLING: [fresh(DOUBLING, s, reached_at=at) for s, at in enumerate((None, 20, 20))],
    }
    found = cells(made_log(changes), DOUBLING)
    assert ("2 of 3", "2.00 (1 of 3 pairs)") == (found["reached"], found["time, 1 device"])


def test_ratios_are_of_the_fastest_fixed_batch_with_a_bold_interval_that_excludes_1():
    changes = {
        fixed(256): [fresh(fixed(256), seed, reached_at=at) for seed, at in enumerate((9, 10, 11))],
        DOUBLING: [fresh(DOUBLING, seed, reached_at=at) for seed, at in enumerate((19, 20, 21))],
    }
    log = made_log(changes)
    ratio = time_ratio(log, DOUBLING, 89.0, 1)
    logs = [math.log(one / other) for one, other in ((19, 9), (20, 10), (21, 11))]
    half_width = 4.303 * stdev(logs) / math.sqrt(3)  # t of two degrees of freedom
    assert pytest.approx(mean(logs)) == ratio.center
    low, high = (math.exp(mean(logs) + sign * half_width) for sign in (-1, 1))
    text = f"**{math.exp(mean(logs)):.2f} [{low:.2f}, {high:.2f}]**"
    assert text == cells(log, DOUBLING)["time, 1 device"]
    assert "1 device: fixed 256; 8 devices: fixed 256" in tables(log)


def test_no_fixed_batch_that_reaches_the_target_leaves_no_ratio():
    changes = {arm: [fresh(arm, s, reached_at=None) for s in range(3)] for arm in (BASE, ARMS[1])}
    log = made_log(changes)
    assert "steps, samples to it" == list(cells(log, DOUBLING))[-1]
    assert "No fixed batch reaches the target" in tables(log)
    (panel,) = figure(log)
    assert f"{log.score}, less that of {BASE}" == panel.title


def test_controls_are_not_among_the_fixed_batches():
    log = made_log(arms=(*ARMS, *map(equal_steps, CONTROLLED), *map(replay_of, CONTROLLED)))
    assert [BASE, fixed(256)] == fixed_arms(log)


def test_differences_from_controls_and_controls_that_are_missing():
    arm = CONTROLLED[0]
    replays = [fresh(replay_of(arm), seed, 88.5 + seed / 10) for seed in range(3)]
    found = cells(made_log({replay_of(arm): replays}), arm, table=1)
    assert "+1.00" == found["minus its replay"]  # in every pair
    assert "minus fixed, equal steps" not in found  # it was not planned
    assert "+0.00" == found["minus doubling"]


def test_a_rate_at_the_edge_is_named():
    log = made_log()
    log.runs.extend(tuning(DOUBLING, 1001, 50.0, lr=lr) for lr in (0.2, 0.4))
    assert "0.1 (edge)" == cells(log, DOUBLING)["rate"]
