"""A comparison resumes what is there, refuses what is of another one, and names its controls."""

import json
import shutil
from dataclasses import asdict, replace

import pytest

from bigbatch.errors import RunError
from bigbatch_recipes.build_loop import build_controller
from bigbatch_recipes.recipe_registry import get_recipe
from bigbatch_recipes.run_config import read_study
from bigbatch_recipes.study import start_sweep
from bigbatch_recipes.sweep_results import read_sweep_results
from log_rows import add_rows, row, write_log
from made_runs import COST, SCORE
from studies.results import any_start, batch_comparisons
from studies.results.batch_comparisons import CONTROLLED, equal_steps, replay_of
from studies.results.comparison import Comparison
from studies.results.comparison_log import log_text

ALL = [*batch_comparisons.COMPARISONS, any_start.COMPARISON]
SMALL = Comparison(
    name="small",
    recipe="digits",
    settings={"epochs": 1, "samples": 200, "held_out": 40},
    arms=lambda _: {"fixed": {"policy": "fixed"}, "adaptive": {}},
    rates=(0.05, 0.1),
    seeds=2,
    tune_seeds=1,
)
ADAPTIVE = replace(SMALL, arms=lambda _: {arm: {} for arm in CONTROLLED}, rates=(0.1,))


def settings_of(comparison):
    return get_recipe(comparison.recipe).settings().with_changes(comparison.settings)


def trained(folder, comparison=SMALL, *, without=()):
    """What a comparison leaves whose arms are trained; 0.1 is the best rate."""
    folder.mkdir()
    (folder / "step_cost.json").write_text(json.dumps(asdict(COST)))
    recipe, points = (
        get_recipe("digits"),
        comparison.points(comparison.arms(COST), settings_of(comparison)),
    )
    start_sweep(recipe, folder / "arms", points, ["lr"], comparison.seeds, comparison.tune_seeds)
    for name, settings in read_study(folder / "arms").trainings.items():
        if name not in without:
            run = write_log(folder / "arms" / name, [], settings)
            add_rows(run, [row(1, batch=20)])
            add_rows(run, [row(2, batch=30, samples=50, accuracy=settings["lr"])])
            (run / "report.html").touch()
    return folder


@pytest.mark.parametrize("comparison", ALL, ids=lambda one: one.name)
def test_all_trainings_of_a_comparison_are_possible(comparison):
    arms = comparison.arms(COST)
    one_rate = replace(comparison, rates=comparison.rates[:1])
    points = one_rate.points(arms, settings_of(comparison))
    assert len(arms) == len({point.name for point in points})
    assert len(comparison.rates) == len({f"{rate:g}" for rate in comparison.rates})
    assert len(points) == len({repr(replace(point.settings, arm="")) for point in points})


def test_a_comparison_that_is_trained_is_collected_alone(tmp_path):
    log = SMALL.train(trained(tmp_path / "runs"), None, 1)
    assert (COST, True) == (log.step_cost, log.higher_is_better)
    assert ["fixed", "adaptive"] == log.arms
    assert [(0.1, 0), (0.1, 1)] == [(run.lr, run.seed) for run in log.fresh("fixed")]
    assert [0.05, 0.1] == [run.lr for run in log.tuning("fixed")]
    assert not any(run.failure for run in log.runs)
    assert log_text(log) == log_text(SMALL.train(tmp_path / "runs", None, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"rates": (0.05, 0.2)},
        {"seeds": 3},
        {"settings": {**SMALL.settings, "batch_size": 48}},
        {"arms": lambda _: {"fixed": {"policy": "fixed"}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_trainings_of_another_comparison_are_not_mixed_in(tmp_path, changes):
    folder = trained(tmp_path / "runs")
    with pytest.raises(RunError, match=r"study.json has other trainings than this comparison"):
        replace(SMALL, **changes).train(folder, None, 1)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"fixed": 1, "speed": 2}'])
def test_a_damaged_step_cost_is_named(tmp_path, text):
    folder = trained(tmp_path / "runs")
    (folder / "step_cost.json").write_text(text)
    with pytest.raises(RunError, match=r"step_cost.json is not the cost of a step"):
        SMALL.train(folder, None, 1)


def controls_of(folder):
    return batch_comparisons.COMPARISONS[0].controls(read_sweep_results(folder / "arms"))


def test_a_replay_has_the_mean_trajectory_of_the_other_fresh_seeds(tmp_path):
    """In folders whose names are patterns too; tuning seeds are 1000 and above."""
    folder = trained(tmp_path / "runs [0-9]*", ADAPTIVE)
    for seed, size in ((0, 10), (1, 25), (1000, 5)):
        run = folder / "arms" / f"{CONTROLLED[0]},lr=0.1-seed{seed}"
        (run / "metrics.jsonl").write_text("")
        for step in range(1, 1 + 50 // size):
            metrics = {SCORE: 1.0} if step * size == 50 else None
            add_rows(run, [row(step, batch=size, metrics=metrics)])
    controls = controls_of(folder)
    changes = controls[replay_of(CONTROLLED[0])]
    (point,) = ADAPTIVE.points({"replay": changes}, settings_of(SMALL))
    harmonic_mean = 100 / (50 / 10 + 50 / 25)
    for seed, size in ((0, 25), (1, 10), (1000, harmonic_mean)):
        settings = point.settings.with_changes({"seed": seed})
        assert f"{size:.0f}" == build_controller(settings).policy.text
    assert round((10 + 25) / 2) == controls[equal_steps(CONTROLLED[0])]["batch_size"]


def test_an_arm_with_a_run_that_failed_has_no_control_until_it_is_trained(tmp_path):
    missing = f"{CONTROLLED[1]},lr=0.1-seed1"
    controls = controls_of(trained(tmp_path / "runs", ADAPTIVE, without=[missing]))
    assert not {replay_of(CONTROLLED[1]), equal_steps(CONTROLLED[1])} & controls.keys()
    assert 2 * (len(CONTROLLED) - 1) == len(controls)


@pytest.mark.release  # trains 18 runs, and 7 again
def test_an_interrupted_comparison_continues_and_gives_the_same_log(tmp_path):
    comparison = replace(
        SMALL,
        controls=lambda results: {
            "replay": {
                "policy": "schedule",
                "replay_from": str(results.path / f"{results.shown[1].name}-seed[0-9]"),
            }
        },
    )

    def runs_of(log):
        assert not any(run.failure for run in log.runs)
        return [
            replace(run, seconds=0.0, curve=tuple((*e[:2], e[3]) for e in run.curve))
            for run in log.runs
        ]

    first = comparison.train(tmp_path / "runs", None, 2)
    for run in [
        *(tmp_path / "runs").glob("*/*-seed1"),
        *(tmp_path / "runs").glob("arms/*-seed1000"),
    ]:
        shutil.rmtree(run)
    (tmp_path / "runs" / "arms" / "fixed,lr=0.1-seed0" / "report.html").unlink(missing_ok=True)
    second = comparison.train(tmp_path / "runs", None, 2)
    assert runs_of(first) == runs_of(second)
    assert first.step_cost == second.step_cost
