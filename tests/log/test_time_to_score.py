"""Steps, samples and seconds to a score: which evaluation counts, and runs that never reach it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import SettingError
from bigbatch.log.history import History, history_of
from bigbatch.log.html_report import write_report
from bigbatch.log.time_to_score import ScoreTargets, TimeToScore, time_to_score
from log_rows import add_rows, row, write_log
from property_tests import property_test

SETTINGS = {"recipe": "digits", "policy": "fixed", "epochs": 1}
ACCURACY = "test accuracy, %"


def history(rows, **settings):
    return History(Path("run"), {**SETTINGS, **settings}, rows)


def scored(step, score, **changes):
    return row(step, metrics={"F1": score, "other": 99.0}, **changes)


ROWS = [row(1), scored(2, 50.0), row(3), scored(4, 85.0), scored(5, 70.0), scored(6, 86.0)]


@pytest.mark.parametrize(
    ("target", "higher", "step"),
    [
        (50.0, True, 2),
        (50.1, True, 4),
        (85.0, True, 4),
        (86.0, True, 6),
        (86.1, True, None),
        (70.0, False, 2),
        (49.9, False, None),
        (-1, True, 2),
    ],
)
def test_the_first_evaluation_at_the_target_or_better_counts(target, higher, step):
    expected = step and TimeToScore(step, 32 * step, step / 10)
    assert expected == time_to_score(history(ROWS), target, higher_is_better=higher)


def test_skipped_steps_are_samples_and_no_steps():
    rows = [row(1, skipped=True), scored(2, 50.0), row(3, skipped=True), scored(4, 85.0)]
    found = time_to_score(history(rows), 85, higher_is_better=True)
    assert TimeToScore(2, 128, 0.4) == found


def test_a_run_without_a_finite_score_never_reaches_one():
    for rows in ([], [row(1)], [scored(1, None), scored(2, None)]):
        assert time_to_score(history(rows), 0.0, higher_is_better=True) is None
    late = time_to_score(history([scored(1, None), scored(2, 1.0)]), 0, higher_is_better=True)
    assert 2 == late.steps


EVALUATED = st.lists(st.sampled_from([0, 1, 2, 3, None]), min_size=1, max_size=12)


@given(EVALUATED, st.lists(st.booleans(), min_size=12, max_size=12), st.booleans())
@property_test(100)
def test_it_is_the_end_of_the_shortest_log_whose_last_score_reaches_the_target(
    scores, skips, higher
):
    """A score of 0 stands for a step without evaluation."""
    rows = [
        row(step, skipped=skip, metrics=None if score == 0 else {"F1": score})
        for step, (score, skip) in enumerate(zip(scores, skips, strict=False), start=1)
    ]
    expected = None
    for length in range(len(rows), 0, -1):
        part = history(rows[:length])
        last = rows[length - 1]["metrics"] and part.last("F1")
        if last is not None and (last >= 2 if higher else last <= 2):
            expected = TimeToScore(part.steps, 32 * length, length / 10)
    assert expected == time_to_score(history(rows), 2, higher_is_better=higher)


@pytest.mark.parametrize("targets", [[float("nan")], [85, float("inf")], ["85"], 85])
def test_a_target_that_is_no_number_is_refused(targets):
    with pytest.raises(SettingError, match="targets="):
        ScoreTargets(targets)
    with pytest.raises(SettingError, match="target="):
        time_to_score(history(ROWS), float("nan"), higher_is_better=True)


# over seeds


def study(path, ends, **settings):
    """Runs of two evaluations, 80 at step 10 and 90 at step `end`; None for a run without 90."""
    runs = []
    for seed, end in enumerate(ends):
        run = write_log(path / f"seed{seed}", [], {**SETTINGS, "seed": seed, **settings})
        add_rows(run, [row(10, accuracy=0.8)])
        add_rows(run, [row(end or 99, accuracy=0.9 if end else 0.89)])
        runs.append(run)
    return runs


@pytest.mark.parametrize(
    ("ends", "cells"),
    [
        ([20, 40, 30], ("3 of 3", "30 [20, 40]", "960 [640, 1,280]", "3.0 [2.0, 4.0]")),
        ([20, 20], ("2 of 2", "20", "640", "2.0")),
        ([20, None, 30], ("2 of 3", "30 [20, never]", "960 [640, never]", "3.0 [2.0, never]")),
        ([20, None], ("1 of 2", "never [20, never]", "never [640, never]", "never [2.0, never]")),
        ([None, None], ("0 of 2", "never", "never", "never")),
        ([20], ("1 of 1", "20", "640", "2.0")),
    ],
)
def test_a_run_that_never_reaches_it_is_counted_and_infinite_in_the_median(tmp_path, ends, cells):
    histories = [history_of(run) for run in study(tmp_path, ends, arm="a")]
    targets = ScoreTargets([80, 90.0])
    first, second = targets.table(histories).rows
    every = f"{len(ends)} of {len(ends)}"
    assert ("a", "at least 80", every, "10", "320", "1.0") == first
    assert ("a", "at least 90", *cells) == second
    title = "first evaluation with this test accuracy, %, median [least, most] over seeds; never"
    assert targets.title(histories).startswith(title)


def test_an_unfinished_run_is_said_to_be_so_and_one_without_a_step_is_counted(tmp_path):
    runs = study(tmp_path, [20, 30], arm="a")
    run = tmp_path / "seed0"
    add_rows(run, [row(40, metrics=None)])  # a resumed run that has not ended
    runs.append(write_log(tmp_path / "seed2", [], {**SETTINGS, "seed": 2, "arm": "a"}))
    (cells,) = ScoreTargets([90]).table([history_of(one) for one in runs]).rows
    assert ("a (2 of 3 unfinished)", "at least 90", "2 of 3", "30 [20, never]") == cells[:4]


def test_a_log_that_was_cut_and_resumed_is_that_of_the_whole_run(tmp_path):
    (run,) = study(tmp_path, [20], arm="a")
    first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (run / "metrics.jsonl").write_text(first)  # as a resumption cuts it to its checkpoint
    add_rows(run, [row(20, accuracy=0.9, elapsed_seconds=7.5)])
    found = time_to_score(history_of(run), 90, higher_is_better=True)
    assert TimeToScore(20, 640, 7.5) == found


# by the command


def test_compare_and_report_show_them_on_request(bigbatch, tmp_path):
    runs = study(tmp_path / "study", [20, None], arm="a")
    status, out, _ = bigbatch("compare", *runs, "--to", "80", "--to", "90")
    assert 0 == status
    assert "a at least 80 2 of 2 10 320 1.0 a at least 90 1 of 2 never" in " ".join(out.split())
    assert "first evaluation" not in bigbatch("compare", *runs)[1]
    page = tmp_path / "page.html"
    assert 0 == bigbatch("report", *runs, "--to", "90", "-o", page)[0]
    assert "<td>at least 90</td><td>1 of 2</td><td>never [20, never]</td>" in page.read_text()
    status, _, err = bigbatch("report", *runs, "--to", "90", "-o", tmp_path / "curves.svg")
    assert 2 == status
    assert "does not go together with --to" in err
    write_report([history_of(run) for run in runs], page, "none")
    assert "first evaluation" not in page.read_text()


def test_a_log_says_whether_less_is_better(bigbatch, tmp_path):
    (run,) = study(tmp_path / "loss", [20], arm="a", higher_is_better=False)
    status, out, _ = bigbatch("compare", run, "--to", "89")
    assert 0 == status
    assert "at most 89" in " ".join(out.split())


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "high"])
def test_a_target_of_the_command_that_is_no_number_is_one_line(bigbatch, tmp_path, text):
    (run,) = study(tmp_path / "study", [20], arm="a")
    status, out, err = bigbatch("compare", run, "--to", text)
    assert (2, "", 1) == (status, out, err.count("\n"))
