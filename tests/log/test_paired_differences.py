"""Differences between arms, paired by seed: the interval, what is counted, where it is shown."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.log.history import history_of
from bigbatch.log.paired_differences import differences_of, paired_difference
from bigbatch.log.text_table import text_table
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


@pytest.mark.parametrize(("pairs", "expected"), [(2, 12.706), (4, 3.182), (8, 2.365), (30, 2.045)])
def test_its_half_width_is_the_t_of_the_tables(pairs, expected):
    """Differences -+ sqrt(n - 1) have the deviation sqrt(n)."""
    differences = [(-1) ** seed * math.sqrt(pairs - 1) for seed in range(pairs)]
    found = paired_difference(by_seed(differences), by_seed([0.0] * pairs))
    assert pytest.approx((-expected, expected), abs=6e-4) == found.interval
    assert "not distinguished" == found.result


SCORES = st.lists(st.tuples(st.floats(-99, 99), st.floats(-99, 99)), min_size=2, max_size=9)


@given(SCORES)
@property_test(100)
def test_the_interval_is_that_of_scipys_paired_test(scores):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    first, second = zip(*scores, strict=True)
    found = paired_difference(by_seed(first), by_seed(second))
    differences = [one - other for one, other in scores]
    if max(differences) - min(differences) < 1e-9:
        assert found.interval is None or max(differences) > min(differences)
        return
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
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
    found = differences_of(histories(study(tmp_path / "study", THREE, changes=changes)))
    shown = text_table(found.table(), found.title, 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert all(word in shown for word in ("[-3.85,", "+8.85]", "(1", "lack"))


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
    figure = tmp_path / "curves.svg"
    status, _, err = bigbatch("report", path, "--against", "bb", "-o", figure)
    assert 2 == status
    assert f"-o {figure} does not go together with --against" in err
    assert not figure.exists()
