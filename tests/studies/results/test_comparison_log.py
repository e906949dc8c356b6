"""The log of a comparison is read as it was written, and has every run once."""

import math

import pytest

from bigbatch.errors import RunError
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.study import start_sweep, trainings_of
from bigbatch_recipes.sweep import Point
from bigbatch_recipes.sweep_results import read_sweep_results
from log_rows import add_rows, row, write_log
from made_runs import SCORE, fresh, log_of, tuning
from studies.results.comparison import logged_runs
from studies.results.comparison_log import LoggedRun, log_text, read_log

FAILED = LoggedRun("b", 0.1, 3, tuning=False, failure='killed\nby "signal" 9')


def test_a_log_is_read_as_it_was_written(tmp_path):
    log = log_of(
        fresh("a", 0),
        fresh("b ± ü", 0, None, diverged=True, spent=7),
        tuning("a"),
        tuning("a", score=None),
        FAILED,
    )
    text = log_text(log)
    (tmp_path / "log.json").write_text(text)
    assert log == read_log(tmp_path / "log.json")
    assert text == log_text(read_log(tmp_path / "log.json"))
    assert 5 == sum(line.startswith('{"arm"') for line in text.splitlines())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_log_has_no_number_that_json_lacks(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        log_text(log_of(fresh("a", 0, value)))


@pytest.mark.parametrize(
    "text", ["", "[]", '"text"', "3", "{}", '{"runs": [3]}', '{"runs": [], "step_cost": {}}']
)
def test_another_file_is_not_a_log(tmp_path, text):
    (tmp_path / "log.json").write_text(text)
    with pytest.raises(RunError, match="is not the log of a comparison"):
        read_log(tmp_path / "log.json")
    with pytest.raises(RunError, match="FileNotFoundError"):
        read_log(tmp_path / "missing.json")


def test_failed_and_diverged_runs_have_no_score():
    assert 90.0 == fresh("a", 0).score(SCORE)
    assert fresh("a", 0).score("other") is None
    assert fresh("a", 0, diverged=True).score(SCORE) is None
    assert FAILED.score(SCORE) is None
    assert math.isnan(FAILED.average_batch)


def test_the_scores_are_those_of_fresh_runs_also_where_the_first_failed():
    log = log_of(tuning("b"), FAILED, fresh("b", 4))
    assert [SCORE, "test loss"] == log.score_names
    with pytest.raises(RunError, match="no run of the log has a score"):
        _ = log_of(tuning("b"), FAILED).score


@pytest.mark.parametrize(("chosen", "at_edge"), [(0.1, True), (0.2, False), (0.4, True)])
def test_the_least_and_the_largest_rate_are_edges(chosen, at_edge):
    log = log_of(fresh("a", 0, lr=chosen), *(tuning("a", lr=lr) for lr in (0.1, 0.2, 0.4)))
    assert f"{chosen}" + " (edge)" * at_edge == log.rate_text("a")


def test_one_rate_alone_has_no_edge():
    assert "0.1" == log_of(fresh("a", 0)).rate_text("a")
    assert "0.1" == log_of(fresh("a", 0), tuning("a")).rate_text("a")


def made_sweep(path, scores, *, tune_seeds=1):
    """A tuned sweep of an arm over rates; scores by (lr, seed), None for a run that is missing."""
    settings = DIGITS.settings().with_changes({"epochs": 1, "held_out": 100})
    points = [
        Point(f"a,lr={lr}", {"arm": "a", "lr": lr}, settings.with_changes({"lr": lr}))
        for lr in dict.fromkeys(lr for lr, _ in scores)
    ]
    start_sweep(DIGITS, path, points, ["lr"], 2, tune_seeds)
    for name, training in trainings_of(DIGITS, points, 2, tune_seeds).items():
        if (score := scores.get((training.lr, training.seed))) is not None:
            run = write_log(path / name, [], training.as_dict())
            add_rows(run, [row(1, skipped=True)])
            add_rows(run, [row(2, accuracy=0.5)])
            add_rows(run, [row(3, metrics={SCORE: score, "test loss": None})])


SCORES = {(0.1, 1000): 80.0, (0.2, 1000): 90.0, (0.2, 0): 91.0, (0.2, 1): 92.0}


def test_runs_of_a_sweep_are_logged_with_their_curves(tmp_path):
    made_sweep(tmp_path / "sweep", SCORES)
    tuned, best, first, second = logged_runs(read_sweep_results(tmp_path / "sweep"), {})
    assert [(True, 0.1, 1000), (True, 0.2, 1000)] == [
        (run.tuning, run.lr, run.seed) for run in (tuned, best)
    ]
    assert () == best.curve
    assert (False, 0.2, 0, 1) == (first.tuning, first.lr, first.seed, second.seed)
    assert (96, 2) == (first.samples, first.steps)  # a step was skipped
    assert ((64, 1, 0.2, 50.0), (96, 2, 0.3, 91.0)) == first.curve
    assert {SCORE: 91.0, "test loss": None} == first.scores


def test_fresh_runs_of_another_rate_than_the_best_are_left_out(tmp_path):
    """The best run of tuning had failed at first, so that another rate was trained."""
    scores = {**SCORES, (0.1, 0): 10.0, (0.1, 1): 11.0}
    made_sweep(tmp_path / "sweep", scores)
    runs = [
        run for run in logged_runs(read_sweep_results(tmp_path / "sweep"), {}) if not run.tuning
    ]
    assert [(0.2, 0), (0.2, 1)] == [(run.lr, run.seed) for run in runs]


def test_a_run_that_failed_is_logged_once_with_its_reason(tmp_path):
    made_sweep(tmp_path / "sweep", SCORES)
    failures = {"a,lr=0.2-seed1": "no space left", "a,lr=0.1-seed1000": "killed by signal 9"}
    runs = logged_runs(read_sweep_results(tmp_path / "sweep"), failures)
    assert 4 == len({(run.lr, run.seed) for run in runs}) == len(runs)
    assert {(1, False): "no space left", (1000, True): "killed by signal 9"} == {
        (run.seed, run.tuning): run.failure for run in runs if run.failure
    }
