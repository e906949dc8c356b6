"""Stable rates, composites and tables of VR optimizers, from logs that were made by hand."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bigbatch_recipes.image_classification import GAP, HELD_OUT, TEST
from bigbatch_recipes.recipe_registry import get_recipe
from bigbatch_recipes.study import trainings_of
from bigbatch_recipes.sweep_results import SweepPoint, SweepResults
from studies.results.comparison import Comparison
from studies.results.comparison_log import ComparisonLog, LoggedRun, log_text, read_log
from studies.results.step_cost import StepCost
from studies.results.variance_reduction import (
    BASE,
    BATCHES,
    BEST_CLIPS,
    CLIPS,
    COMPARISON,
    COMPOSED,
    GAMMAS,
    arm_of,
    mean_rate_of,
)
from studies.results.vr_tables import (
    advantage,
    compare_stable,
    composite,
    figure,
    is_stable,
    largest_stable_rate,
    tables,
)

COST = StepCost(1e-3, 1e-6, 1000)
ARMS = COMPARISON.arms(COST)
NOISE = (0.5, -0.5, 0.3, -0.3, 0.1, -0.1, 0.2, -0.2)  # of the eight seeds


def tuning_run(arm, lr, score=80.0, **values):
    return LoggedRun(arm, lr, 1000, True, scores={HELD_OUT: score}, **values)


def fresh_runs(arm, lr, mean, gap=2.0, **values):
    return [
        LoggedRun(arm, lr, seed, False, scores={TEST: mean + noise, GAP: gap + noise}, **values)
        for seed, noise in enumerate(NOISE)
    ]


def log_of(*runs):
    return ComparisonLog({}, True, COST, list(runs))


def clip_of(arm):
    return next((clip for clip in CLIPS if f", {clip};" in arm), BASE)


def whole_log(effects, gaps=None):
    """Every arm at the second rate of its grid; those of a clip are better by its effect.

    The scatter of the effects over the seeds is a tenth of the seeds' own. The three lower rates
    are stable.
    """
    runs = []
    for arm, changes in ARMS.items():
        rates, effect = changes["lr"], effects.get(clip_of(arm), 0.0)
        values = {"gamma": 0.5, "r_max": 1.0} if BEST_CLIPS in arm else {}
        for gamma in GAMMAS if values else (0.5,):
            tuned = {**values, "gamma": gamma} if values else {}
            runs += [
                tuning_run(arm, lr, 80.0 + 10 * gamma if n < 3 else 20.0, values=tuned)
                for n, lr in enumerate(rates)
            ]
        gap = (gaps or {}).get(clip_of(arm), 2.0)
        for run in fresh_runs(arm, rates[1], 80.0 + effect, gap, values=values):
            scatter = NOISE[(run.seed + 3) % 8] / 10 if effect else 0.0
            scores = {name: score + scatter for name, score in run.scores.items()}
            runs.append(replace(run, scores=scores))
    for optimizer in ("sgd", "momentum"):
        for batch in BATCHES[optimizer]:
            runs += fresh_runs(mean_rate_of(optimizer, batch), 0.1, 78.0)
    return log_of(*runs)


def test_a_stable_training_neither_fails_nor_diverges_and_learns():
    run = tuning_run("arm", 0.1, 50.1)
    assert is_stable(run)
    assert not is_stable(tuning_run("arm", 0.1, 50.0))  # 40 points above chance
    assert not is_stable(tuning_run("arm", 0.1, None))
    assert not is_stable(replace(run, diverged=True))
    assert not is_stable(LoggedRun("arm", 0.1, 1000, True, failure="out of memory"))


def test_every_training_of_a_stable_rate_is_stable():
    runs = [tuning_run("arm", lr, score) for lr, score in ((1, 80), (2, 70), (4, 60), (8, 20))]
    assert (4, False) == largest_stable_rate(log_of(*runs), "arm")
    unstable = replace(runs[2], seed=1001, diverged=True)
    assert (2, False) == largest_stable_rate(log_of(*runs, unstable), "arm")
    assert (4, True) == largest_stable_rate(log_of(*runs[:3]), "arm")
    assert (None, False) == largest_stable_rate(log_of(runs[3]), "arm")


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ({1: 80, 2: 80, 4: 20}, {1: 80, 2: 20, 4: 20}, "larger"),
        ({1: 80, 2: 20, 4: 20}, {1: 80, 2: 80, 4: 20}, "smaller"),
        ({1: 80, 2: 80, 4: 20}, {1: 80, 2: 80, 4: 20}, "equal"),
        ({1: 80, 2: 80, 4: 80}, {1: 80, 2: 80, 4: 80}, "open"),  # 8 may be stable for one of them
        ({1: 80, 2: 80}, {1: 80, 2: 80, 4: 20}, "open"),  # 4 may be stable too
        ({1: 80}, {1: 80, 2: 80, 4: 20}, "open"),
        ({1: 80, 2: 80, 4: 20}, {1: 80}, "open"),
        ({1: 80, 2: 80, 4: 80}, {1: 80, 2: 20, 4: 20}, "larger"),
        ({1: 20, 2: 20}, {1: 80, 2: 20}, "open"),  # a smaller rate was not tried
    ],
)
def test_stable_rates_are_compared_only_where_the_grids_show_them(own, base, expected):
    runs = [
        tuning_run(arm_of("adam", version, 64), lr, score)
        for version, grid in (("r_max 1", own), (BASE, base))
        for lr, score in grid.items()
    ]
    assert expected == compare_stable(log_of(*runs), "adam", "r_max 1", 64)


def test_a_composite_is_the_mean_over_four_optimizers_of_each_seed():
    runs = [
        run
        for value, optimizer in zip((70.0, 72.0, 74.0, 80.0), COMPOSED, strict=True)
        for run in fresh_runs(arm_of(optimizer, BASE, 512), 0.1, value)
    ]
    expected = {seed: pytest.approx(74.0 + noise) for seed, noise in enumerate(NOISE)}
    assert expected == composite(log_of(*runs), BASE, 512)
    runs[3] = replace(runs[3], diverged=True)  # seed 3
    assert {**expected, 3: None} == composite(log_of(*runs), BASE, 512)


def test_an_advantage_is_paired_by_seed():
    own, base = (arm_of("adam", version, 64) for version in ("r_max 10", BASE))
    runs = [*fresh_runs(own, 0.1, 83.0), *fresh_runs(base, 0.2, 80.0)]
    runs[0] = replace(runs[0], diverged=True)
    expected = {0: None, **{seed: pytest.approx(3.0) for seed in range(1, 8)}}
    assert expected == advantage(log_of(*runs), "adam", "r_max 10", 64)


def rows_of(text, title):
    """The rows of a table below a title, as dictionaries."""
    lines = text.split(title)[1].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_differences_that_were_put_in_are_bold_with_their_sign_and_others_are_not():
    text = tables(whole_log({"r_max 1": 1.0, "r_max 10": -2.0}, gaps={"r_max 10": 1.0}))
    for row in rows_of(text, "both upper clips:"):
        expected = {BASE: "", "r_max 1": "**+1.00", "r_max 10": "**-2.00"}[row["version"]]
        assert row["minus base"].startswith(expected)
        assert bool(expected) == bool(row["minus base"])
    for row in rows_of(text, "Composite of momentum, adam, lars, lamb:"):
        assert "80.00 ± 0.33" == row[TEST]
        assert row["r_max 1"].startswith("**+1.00 [")
        assert row["r_max 10 (gap)"].startswith("**-1.00 [")
        assert row["r_max 1 (gap)"].startswith("+0.00 [-")
    growth = rows_of(text, "minus that with 64:")
    assert {"+0.00"} == {row["r_max 1"] for row in growth}
    assert all(row["minus base at the mean rate"].startswith("**+3.00") for row in controls(text))


def controls(text):
    return rows_of(text, "Controls of r_max 1:")


def test_the_control_at_the_same_rate_is_that_of_the_grid():
    log = whole_log({})
    arm, base = (arm_of("momentum", version, 512) for version in ("r_max 1", BASE))
    rate = log.rate(arm)
    runs = [
        replace(run, scores={HELD_OUT: 77.0}) if run.tuning and (run.arm, run.lr) == key else run
        for key in [(base, rate)]
        for run in log.runs
    ]
    row = next(row for row in controls(tables(replace(log, runs=runs))) if arm == row["arm"])
    assert f"{rate:g}" == row["rate"]
    assert "+8.00" == row["minus base at the same rate (held-out, one seed)"]
    without = [run for run in runs if not (run.tuning and (run.arm, run.lr) == (base, rate))]
    row = next(row for row in controls(tables(replace(log, runs=without))) if arm == row["arm"])
    assert "none" == row["minus base at the same rate (held-out, one seed)"]


def test_stable_rates_are_decided_by_a_sign_test_over_the_pairs():
    log = whole_log({})
    pairs = [(optimizer, batch) for optimizer, sizes in BATCHES.items() for batch in sizes]
    for optimizer, batch in pairs[:7]:  # one rate more is stable
        arm = arm_of(optimizer, "r_max 1", batch)
        runs = [
            replace(run, scores={HELD_OUT: 80.0})
            if run.arm == arm and run.tuning and run.lr == ARMS[arm]["lr"][3]
            else run
            for run in log.runs
        ]
        log = replace(log, runs=runs)
    row = rows_of(tables(log), "compared with that of the base:")[0]
    assert ("r_max 1", "7", "0", "6", "0") == tuple(row.values())[:5]
    assert "0.016" == row["p"]  # 2 / 2^7


def test_the_figure_draws_means():
    charts = figure(whole_log({"r_max 10": -2.0}))
    lines = {line.name: line for line in charts[4].series}
    assert pytest.approx([78.0] * 3) == list(lines["r_max 10"].y)
    assert (64, 512, 4096) == tuple(lines[BASE].x)


def test_a_log_keeps_the_other_tuned_values(tmp_path):
    file = tmp_path / "log.json"
    log = whole_log({})
    file.write_text(log_text(log))
    assert log == read_log(file)


def test_the_arms_are_trainable_have_grids_of_factor_two_and_measure_eight_groups():
    settings = COMPARISON.recipe_settings("")
    points = COMPARISON.points(ARMS, settings)
    for arm, changes in ARMS.items():
        rates = changes["lr"]
        assert all(math.isclose(2 * low, high) for low, high in pairwise(rates))
        is_vr = arm.startswith("vr-")
        assert is_vr == (changes.get("groups") == 8)
        assert is_vr or {*changes} == {"optimizer", "batch_size", "every", "lr"}
    best = [point for point in points if BEST_CLIPS in str(point.values["arm"])]
    assert {(g, r) for g in GAMMAS for r in CLIPS.values()} == {
        (point.values["gamma"], point.values["r_max"]) for point in best
    }
    assert len({point.name for point in points}) == len(points)


def test_a_control_takes_the_rate_of_the_best_point_and_the_run_of_its_own_seed():
    points = [
        SweepPoint(point.name, point.values, [0], [])
        for point in COMPARISON.points(ARMS, COMPARISON.recipe_settings(""))
    ]
    results = SweepResults(Path("/sweep"), [], points, ("lr", "gamma", "r_max"), (1000,), True)
    made = COMPARISON.controls(results)
    assert [mean_rate_of("sgd", 4096)] + [
        mean_rate_of("momentum", batch) for batch in BATCHES["momentum"]
    ] == list(made)
    arm = mean_rate_of("momentum", 64)
    (point,) = COMPARISON.points({arm: made[arm]}, COMPARISON.recipe_settings(""))
    trainings = trainings_of(get_recipe(COMPARISON.recipe), [point], 2, 1)
    chosen = next(p for p in results.shown if p.values["arm"] == arm_of("momentum", "r_max 1", 64))
    assert {f"/sweep/{chosen.name}-seed{seed}" for seed in (0, 1, 1000)} == {
        training.lr_control_from for training in trainings.values()
    }
    assert {chosen.values["lr"]} == {training.lr for training in trainings.values()}
    assert {"momentum"} == {training.optimizer for training in trainings.values()}


def test_an_arm_is_tuned_over_its_own_values_or_the_rates_of_all():
    comparison = Comparison(
        name="x", recipe="digits", settings={}, arms=lambda _: {}, rates=(0.1, 0.2), seeds=1
    )
    arms = {"a": {}, "b": {"lr": (0.4,), "momentum": (0.5, 0.8)}, "c": {"momentum": 0.3}}
    points = comparison.points(arms, comparison.recipe_settings(""))
    assert [
        "a,lr=0.1",
        "a,lr=0.2",
        "b,lr=0.4,momentum=0.5",
        "b,lr=0.4,momentum=0.8",
        "c,lr=0.1",
        "c,lr=0.2",
    ] == [point.name for point in points]
    assert (0.4, 0.8) == (points[3].settings.lr, points[3].settings.momentum)
    assert {"arm": "b", "lr": 0.4, "momentum": 0.8} == points[3].values
