"""Differences between arms, paired by seed: the interval, what is counted, where it is shown."""

import csv
import io
import json
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bigbatch.errors import SettingError
from bigbatch.log.history import history_of
from bigbatch.log.html_report import write_report
from bigbatch.log.paired_differences import differences_of, paired_difference
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.run_config import study_yaml
from bigbatch_recipes.study import report_study
from bigbatch_recipes.sweep_page import write_sweep
from bigbatch_recipes.sweep_results import read_sweep_results
from log_rows import add_rows, row, write_log
from property_tests import property_test

ACCURACY = "test accuracy, %"


def by_seed(values):
    return dict(enumerate(values))


# the interval


def test_the_interval_is_students_of_his_sleep_data():
    """Hours of sleep with two drugs (Student 1908); R's t.test(paired=TRUE) prints these ends."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(by_seed(second), by_seed(first))
    assert pytest.approx(1.58) == found.center
    assert pytest.approx((0.7001142, 2.4598858), abs=1e-4) == found.interval
    assert ("above", 10, 0) == (found.result, found.pairs, found.missing)
    other = paired_difference(by_seed(first), by_seed(second))
    assert "below" == other.result
    assert pytest.approx((-2.4598858, -0.7001142), abs=1e-4) == other.interval


@pytest.mark.parametrize(
    ("pairs", "level", "expected"),
    [(2, 0.95, 12.706), (4, 0.95, 3.182), (8, 0.95, 2.365), (8, 0.9, 1.895), (30, 0.95, 2.045)],
)
def test_its_half_width_is_the_t_of_the_tables(pairs, level, expected):
    """Differences -+ sqrt(n - 1) have the deviation sqrt(n)."""
    differences = [(-1) ** seed * math.sqrt(pairs - 1) for seed in range(pairs)]
    found = paired_difference(by_seed(differences), by_seed([0.0] * pairs), level)
    assert pytest.approx((-expected, expected), abs=6e-4) == found.interval
    assert "not distinguished" == found.result


SCORES = st.lists(st.tuples(st.floats(-99, 99), st.floats(-99, 99)), min_size=2, max_size=9)


@given(SCORES, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
@property_test(100)
def test_the_interval_is_that_of_scipys_paired_test(scores, level):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    first, second = zip(*scores, strict=True)
    found = paired_difference(by_seed(first), by_seed(second), level)
    differences = [one - other for one, other in scores]
    if max(differences) - min(differences) < 1e-9:
        assert found.interval is None or max(differences) > min(differences)
        return
    expected = stats.ttest_rel(first, second).confidence_interval(level)
    # the quadrature of t is good to 1e-3 where tails are heaviest
    width = expected.high - expected.low
    assert pytest.approx(tuple(expected), abs=1e-3 * width) == found.interval
    words = {(True, False): "above", (False, True): "below", (False, False): "not distinguished"}
    assert words[found.interval[0] > 0, found.interval[1] < 0] == found.result


def test_it_covers_the_true_difference_as_often_as_its_level_says():
    """Zero is in 95 % of the intervals of 2,000 studies, whatever their five seeds share."""
    draw = random.Random(0).gauss
    covered = 0
    for _ in range(2000):
        common = [draw(80, 10) for _ in range(5)]
        one, other = ([seed + draw(0, 1) for seed in common] for _ in range(2))
        covered += paired_difference(by_seed(one), by_seed(other)).result == "not distinguished"
    assert pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000)) == covered / 2000


# what has no interval


@pytest.mark.parametrize(
    ("scores", "reference", "cells"),
    [
        ({0: 91.5}, {0: 90.0}, ("+1.50", "none", "1", "one pair: no interval")),
        ({0: 91.5}, {1: 90.0}, ("none", "none", "0", "no common seed")),
        ({}, {}, ("none", "none", "0", "no common seed")),
        (
            {0: None, 1: 91.0},
            {0: 90.0, 1: None},
            ("none", "none", "0 (2 of 2 pairs lack a score)", "no pair has both scores"),
        ),
        (
            {0: None, 1: 91.0},
            {0: 90.0, 1: 91.0},
            ("+0.00", "none", "1 (1 of 2 pairs lack a score)", "one pair: no interval"),
        ),
        (
            {0: 1.0, 1: 2.0},
            {0: 1.0, 1: 2.0},
            ("+0.0000", "none", "2", "equal in every pair: no interval"),
        ),
        (
            {0: 70.3, 1: 70.2, 2: 70.1},  # whose differences of 0.1 differ by rounding
            {0: 70.2, 1: 70.1, 2: 70.0},
            ("+0.10", "none", "3", "equal in every pair: no interval"),
        ),
        (
            {0: math.inf, 1: math.nan, 2: 0.5, 3: 0.7},
            {0: 0.1, 1: 0.1, 2: 0.4, 3: 0.4},
            ("+0.2000", "[-1.0706, +1.4706]", "2 (2 of 4 pairs lack a score)", "not distinguished"),
        ),
    ],
)
def test_a_pair_that_lacks_a_score_is_counted_and_never_averaged(scores, reference, cells):
    assert cells == paired_difference(scores, reference).cells()


@pytest.mark.parametrize("level", [0.0, 1.0, math.nan, "0.9"])
def test_a_level_that_is_no_coverage_is_refused(level):
    with pytest.raises(SettingError, match="level="):
        paired_difference({0: 1.0}, {0: 2.0}, level)


# studies


def study(path, scores, *, changes=None):
    """A study of one epoch with the last score of each arm's seeds; None for a run without one.

    `changes` are those of the last row of some (arm, seed).
    """
    settings = {
        f"{arm}-seed{seed}": {"arm": arm, "seed": seed, "epochs": 1, "policy": "fixed"}
        for arm, of_arm in scores.items()
        for seed in range(len(of_arm))
    }
    path.mkdir()
    (path / "study.yaml").write_bytes(study_yaml({"trainings": settings}))
    for name, one in settings.items():
        run = write_log(path / name, [], {**one, "batch_size": len(one["arm"])})
        score = scores[one["arm"]][one["seed"]]
        add_rows(run, [row(1, loss=1.0)])
        last = row(2, loss=1.0, metrics={ACCURACY: score, "other": 1.0})
        add_rows(run, [{**last, **(changes or {}).get((one["arm"], one["seed"]), {})}])
    return path


def histories(path):
    return [history_of(run) for run in sorted(path.glob("*-seed*"))]


THREE = {"a": [90.0, 91.0, 95.0], "bb": [91.0, 93.0, 98.0], "ccc": [90.5, 90.5, 95.0]}


def test_every_other_arm_is_compared_with_the_first_or_with_the_one_that_is_named(tmp_path):
    runs = histories(study(tmp_path / "study", THREE))
    found = differences_of(runs)
    assert "difference from a, paired by seed, 95 % interval" == found.title
    assert ("run", ACCURACY, "interval", "pairs", "result") == found.table().columns
    assert [
        ("bb", "+2.00", "[-0.48, +4.48]", "3", "not distinguished"),  # 4.303 / sqrt 3
        ("ccc", "+0.00", "[-1.24, +1.24]", "3", "not distinguished"),
    ] == found.table().rows
    assert ["a", "bb"] == list(differences_of(runs, "ccc").arms)
    assert -2.0 == differences_of(runs, "bb").arms["a"].center
    assert differences_of(runs[:3]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 1e9},  # diverged
        {"metrics": {ACCURACY: None}},
        {"metrics": None},  # unfinished
    ],
)
@pytest.mark.parametrize("arm", ["a", "bb"])
def test_a_run_that_diverged_or_has_no_last_score_is_in_no_difference(tmp_path, change, arm):
    scores = {"a": [90.0, 91.0, 95.0], "bb": [91.0, 93.0, 98.0]}
    path = study(tmp_path / "study", scores, changes={(arm, 1): change})
    found = differences_of(histories(path)).arms["bb"]
    assert {0: 1.0, 2: 3.0} == found.by_seed
    assert "2 (1 of 3 pairs lack a score)" == found.cells()[2]


def test_seeds_of_one_arm_alone_are_no_pairs(tmp_path):
    path = study(tmp_path / "study", {"a": [90.0, 91.0], "bb": [92.0, 94.0, 10.0]})
    found = differences_of(histories(path)).arms["bb"]
    assert ({0: 2.0, 1: 3.0}, 2) == (found.by_seed, found.pairs)


def test_several_runs_of_a_seed_are_one_pair_with_their_mean(tmp_path):
    """As two trainings of the same study are; a pair needs the scores of all of them."""
    twice = [study(tmp_path / name, THREE) for name in ("first", "second")]
    runs = [one for path in twice for one in histories(path)]
    assert [3, 3] == [one.pairs for one in differences_of(runs).arms.values()]
    lower = study(tmp_path / "lower", {**THREE, "bb": [81.0, None, 88.0]})
    found = differences_of([*histories(twice[0]), *histories(lower)]).arms["bb"]
    assert ({0: -4.0, 2: -2.0}, 3) == (found.by_seed, found.pairs)


def test_arms_with_another_main_score_have_no_difference(tmp_path):
    other = {("bb", seed): {"metrics": {"F1": 88.0}} for seed in range(3)}
    found = differences_of(histories(study(tmp_path / "study", THREE, changes=other)))
    assert ACCURACY == found.score
    assert "0 (3 of 3 pairs lack a score)" == found.arms["bb"].cells()[2]
    assert "F1" == differences_of(histories(tmp_path / "study"), "bb").score


def test_a_log_that_was_cut_and_resumed_counts_its_last_score(tmp_path):
    path = study(tmp_path / "study", {"a": [90.0, 91.0], "bb": [92.0, 94.0]})
    run = path / "bb-seed0"
    first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (run / "metrics.jsonl").write_text(first)  # as a resumption cuts it to its checkpoint
    assert {1: 3.0} == differences_of(histories(path)).arms["bb"].by_seed
    add_rows(run, [row(2, loss=1.0, accuracy=0.97)])
    assert {0: 7.0, 1: 3.0} == differences_of(histories(path)).arms["bb"].by_seed


# where they are shown


def test_compare_shows_them_below_the_table(bigbatch, tmp_path):
    path = study(tmp_path / "study", THREE)
    status, out, _ = bigbatch("compare", path)
    assert 0 == status
    assert out.index("standard deviation") < out.index("difference from a, paired by seed, 95 %")
    assert "[-0.48, +4.48]" in out
    _, out, _ = bigbatch("compare", path, "--against", "bb")
    assert "difference from bb" in out
    assert "[-4.48, +0.48]" in out
    _, out, _ = bigbatch("compare", path / "a-seed0")
    assert "difference" not in out


def test_the_table_of_differences_is_shown_whole_in_80_columns(tmp_path):
    changes = {("bb", 0): {"metrics": None}}
    shown = io.StringIO()
    found = differences_of(histories(study(tmp_path / "study", THREE, changes=changes)))
    LiveView(Console(width=80, file=shown)).differences(found)
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    assert all(word in shown.getvalue() for word in ("[-3.85,", "+8.85]", "(1", "lack"))


@pytest.mark.parametrize("command", ["compare", "report"])
def test_an_unknown_reference_is_one_line_with_the_names(bigbatch, tmp_path, command):
    path = study(tmp_path / "study", THREE)
    status, out, err = bigbatch(command, path, "--against", "b")
    assert (2, "") == (status, out)
    assert "--against 'b' is unknown; choose one of: a, bb, ccc" in err
    assert not (path / "report.html").exists()


def test_the_page_has_them_and_a_figure_refuses_the_option(bigbatch, tmp_path):
    path = study(tmp_path / "study", THREE)
    assert 0 == bigbatch("report", path, "--against", "bb")[0]
    page = (path / "report.html").read_text()
    assert "difference from bb, paired by seed, 95 % interval" in page
    assert "<td>-2.00</td><td>[-4.48, +0.48]</td><td>3</td><td>not distinguished</td>" in page
    figure = tmp_path / "curves.png"
    status, _, err = bigbatch("report", path, "--against", "bb", "-o", figure)
    assert 2 == status
    assert f"-o {figure} does not go together with --against" in err
    assert not figure.exists()


def sweep(path, scores, tuned=()):
    """A sweep of lr and target, with the scores of (lr, target) by seed; None without a run."""
    points = {f"lr={lr},target={t}": {"lr": lr, "target": t} for lr, t in scores}
    of_point = dict(zip(points, scores.values(), strict=True))
    trainings = {
        f"{name}-seed{seed}": {"arm": name, "seed": seed, "epochs": 1, "policy": "fixed"}
        for name, values in of_point.items()
        for seed in range(len(values))
    }
    description = {
        "tuned": list(tuned),
        "tuning_seeds": [],
        "higher_is_better": True,
        "points": points,
    }
    path.mkdir()
    content = {"trainings": trainings, "sweep": description}
    (path / "study.yaml").write_bytes(study_yaml(content))
    for name, settings in trainings.items():
        score = of_point[settings["arm"]][settings["seed"]]
        if score is not None:
            run = write_log(path / name, [], settings)
            add_rows(run, [row(1, metrics={ACCURACY: score})])
    return read_sweep_results(path)


SWEPT = {
    (0.1, 0.2): [90.0, 91.0, 95.0],
    (0.2, 0.2): [80.0, 80.0, 80.0],
    (0.1, 0.4): [70.0, 70.0, 70.0],
    (0.2, 0.4): [91.0, 93.0, 98.0],
}


def test_a_sweep_compares_its_shown_points_and_says_that_their_choice_is_left_out(tmp_path):
    found = sweep(tmp_path / "sweep", SWEPT, ("lr",)).differences()
    assert ["lr=0.2,target=0.4"] == list(found.arms)
    expected = "difference from lr=0.1,target=0.2, paired by seed, 95 % interval"
    assert f"{expected}; it leaves out the choice of lr" == found.title
    named = read_sweep_results(tmp_path / "sweep").differences("lr=0.2,target=0.2")
    assert ["lr=0.1,target=0.2", "lr=0.2,target=0.4"] == list(named.arms)
    assert pytest.approx(14.0) == named.arms["lr=0.2,target=0.4"].center
    assert sweep(tmp_path / "one", {(0.1, 0.2): [90.0]}).differences() is None


def test_a_run_of_a_sweep_that_failed_is_a_pair_that_lacks_a_score(tmp_path):
    scores = {(0.1, 0.2): [90.0, None, 95.0], (0.1, 0.4): [91.0, 93.0, 98.0]}
    found = sweep(tmp_path / "sweep", scores).differences().arms["lr=0.1,target=0.4"]
    assert ({0: 1.0, 2: 3.0}, 3) == (found.by_seed, found.pairs)


def test_the_table_of_a_sweeps_runs_has_the_differences(tmp_path):
    results = sweep(tmp_path / "sweep", SWEPT, ("lr",))
    write_sweep(results, tmp_path)
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [""] * 9 + ["1.0", "2.0", "3.0"] == [one["difference"] for one in rows]


def shown_by_study(path):
    """What `bigbatch train` or `sweep` shows at the end."""
    shown = io.StringIO()
    report_study(path, LiveView(Console(width=200, file=shown)))
    return shown.getvalue()


def test_a_study_ends_with_its_differences(tmp_path):
    out = shown_by_study(study(tmp_path / "study", THREE))
    assert out.index("standard deviation") < out.index("difference from a, paired by seed, 95 %")
    assert "[-0.48, +4.48]" in out


def test_a_sweep_ends_with_those_of_its_shown_points_and_its_page_has_them_twice(tmp_path):
    results = sweep(tmp_path / "sweep", SWEPT, ("lr",))
    out = shown_by_study(tmp_path / "sweep")
    assert "[-0.48, +4.48]" in out
    assert "-12.00" not in out  # of a point that is not shown
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert 1 == page.count("it leaves out the choice of lr")
    assert 2 == page.count("difference from lr=0.1,target=0.2")
    assert "<td>lr=0.2,target=0.2</td><td>-12.00</td>" in page
    with pytest.raises(SettingError, match="choose one of: lr=0"):
        write_report(results.drawn, tmp_path / "no.html", "sweep", [results], against="lr=0.1")
    assert not (tmp_path / "no.html").exists()


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
