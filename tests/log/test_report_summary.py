"""The sentences on top of a report are true in every case."""

import pytest

from bigbatch.log.history import History
from bigbatch.log.report_summary import summaries_of
from log_rows import row

SCORE = "test accuracy, %"


def run(tmp_path, arm, seed, *, sizes=(32,) * 40, score=90.0, epochs=1, **changes):
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    rows = [
        row(n, batch=size, samples=end)
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True), start=1)
    ]
    if rows:
        rows[-1] |= {"metrics": None if score == "none" else {SCORE: score}, **changes}
    settings = {"arm": arm, "seed": seed, "epochs": epochs}
    return History(tmp_path / f"{arm}-{seed}", settings, rows)


def seeds(tmp_path, arm, scores, **options):
    return [run(tmp_path, arm, seed, score=one, **options) for seed, one in enumerate(scores)]


def texts(histories, against=None):
    return {one.name: one.text for one in summaries_of(histories, against)}


def test_an_arm_is_compared_with_the_first(tmp_path):
    sizes = (32,) * 8 + (64,) * 2 + (512,) * 3
    runs = seeds(tmp_path, "fixed-32", [90.0, 92.0], sizes=(32,) * 50)
    runs += seeds(tmp_path, "simigrad", [90.5, 92.5], sizes=sizes)
    found = texts(runs)
    assert (
        "batch stayed at 32; 50 steps; mean test accuracy, %: 91.00 (90.00 to 92.00 over 2 runs)"
    ) == found["fixed-32 (reference)"]
    assert (
        "batch grew from 32 to 512; 74 % fewer steps than fixed-32, 20 % more samples than it; "
        "mean test accuracy, %: 91.50, within the range of the 2 runs of fixed-32"
    ) == found["simigrad"]


def test_the_reference_may_be_named_and_comes_first(tmp_path):
    runs = seeds(tmp_path, "a", [90.0]) + seeds(tmp_path, "b", [90.0])
    assert ["b (reference)", "a"] == list(texts(runs, "b"))
    assert ["a (reference)", "b"] == list(texts(runs, "a point of another sweep"))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((64,) * 10, "batch stayed at 64;"),
        ((64,) * 9 + (7,), "batch stayed at 64;"),  # what remains of the epoch
        ((64, *(32,) * 40), "batch shrank from 64 to 32;"),
        ((32, *(64,) * 40), "batch grew from 32 to 64;"),
        (
            (32, *(128,) * 9, *(64,) * 40),
            "batch grew from 32 to 64 (between 32 and 128 on the way);",
        ),
        (
            (32, *(64,) * 9, *(32,) * 40),
            "batch began at 32 and ended at 32 (between 32 and 64 on the way);",
        ),
    ],
)
def test_the_batch_grows_shrinks_stays_or_returns(tmp_path, sizes, text):
    (found,) = texts([run(tmp_path, "a", 0, sizes=sizes)]).values()
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (40, "as many steps as a;"),
        (20, "50 % fewer steps than a;"),
        (50, "25 % more steps than a;"),
        (120, "3 times the steps of a;"),
    ],
)
def test_steps_are_fewer_more_or_as_many(tmp_path, count, text):
    sizes = [1280 // count] * count
    sizes[0] += 1280 - sum(sizes)
    runs = [run(tmp_path, "a", 0), run(tmp_path, "b", 0, sizes=sizes)]
    assert text in texts(runs)["b"]
    assert "samples than" not in texts(runs)["b"]


@pytest.mark.parametrize(
    ("scores", "place"),
    [
        ([89.0, 89.5], "below all"),
        ([93.0, 95.0], "above all"),
        ([92.0, 92.0], "within the range of the"),
    ],
)
def test_a_mean_is_compared_with_the_range_of_the_reference(tmp_path, scores, place):
    runs = seeds(tmp_path, "a", [90.0, 92.0]) + seeds(tmp_path, "b", scores)
    assert texts(runs)["b"].endswith(f", {place} 2 runs of a")


def test_one_seed_has_no_range(tmp_path):
    found = texts([run(tmp_path, "a", 0, score=90.0), run(tmp_path, "b", 0, score=91.0)])
    assert found["a (reference)"].endswith("; test accuracy, %: 90.00")
    assert found["b"].endswith("; test accuracy, %: 91.00 (a: 90.00)")
    assert "range" not in "".join(found.values())


def test_a_lone_arm_is_no_reference(tmp_path):
    assert ["a"] == list(texts([run(tmp_path, "a", 0)]))
    assert [] == summaries_of([])


def test_diverged_runs_are_counted_and_in_no_score(tmp_path):
    runs = seeds(tmp_path, "a", [90.0, 92.0]) + seeds(tmp_path, "b", [91.0, 91.0])
    runs.append(run(tmp_path, "b", 2, score=10.0))
    for one in runs[-1].rows[1:]:
        one["loss"] = 1e9
    assert texts(runs)["b"].endswith(
        "mean test accuracy, %: 91.00, within the range of the 2 runs of a; 1 of 3 runs diverged"
    )
    for history in runs[:2]:
        for one in history.rows[1:]:
            one["loss"] = 1e9
    found = texts(runs)
    assert "; no final test accuracy, %; 2 of 2 runs diverged" in found["a (reference)"]
    assert "; mean test accuracy, %: 91.00; 1 of 3 runs diverged" in found["b"]


def test_unfinished_runs_have_no_score_and_their_steps_are_not_compared(tmp_path):
    runs = [run(tmp_path, "a", 0), run(tmp_path, "b", 0, sizes=(32,) * 10, score="none")]
    assert (
        "batch stayed at 32; 10 steps so far; no final test accuracy, %; 1 of 1 run unfinished"
    ) == texts(runs)["b"]
    assert "; 40 steps; test accuracy, %: 90.00; " not in texts(runs, "b")["a"]
    assert texts(runs, "b")["a"].endswith("40 steps; test accuracy, %: 90.00")


def test_runs_without_a_score_or_a_step_say_so(tmp_path):
    runs = [run(tmp_path, "a", 0, score="none"), run(tmp_path, "b", 0, sizes=())]
    found = texts(runs)
    assert "; no score yet; " in found["a (reference)"]
    assert "no step yet" == found["b"]


def test_the_center_is_the_median_where_the_runs_ask_for_it(tmp_path):
    runs = seeds(tmp_path, "a", [90.0, 95.0, 10.0])
    for one in runs:
        one.settings["over_seeds"] = "median"
    assert "median test accuracy, %: 90.00 (10.00 to 95.00 over 3 runs)" in texts(runs)["a"]
