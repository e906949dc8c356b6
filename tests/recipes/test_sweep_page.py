"""What is shown of a sweep: differences of its points, its figure, its page and its files."""

import csv
from xml.etree import ElementTree

import pytest

from bigbatch.log.chart_svg import svg
from bigbatch.log.series_style import NEUTRAL
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.run_config import study_json
from bigbatch_recipes.study import report_study
from bigbatch_recipes.sweep_page import sweep_panel, write_sweep
from bigbatch_recipes.sweep_results import read_sweep_results
from log_rows import add_rows, row, write_log

ACCURACY = "test accuracy, %"


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
    (path / "study.json").write_bytes(study_json(trainings, description))
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


def test_a_sweep_ends_with_those_of_its_shown_points_and_its_page_has_them_twice(tmp_path, capsys):
    sweep(tmp_path / "sweep", SWEPT, ("lr",))
    report_study(tmp_path / "sweep", LiveView())
    out = capsys.readouterr().out
    assert "[-0.48, +4.48]" in out
    assert "-12.00" not in out  # of a point that is not shown
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert 1 == page.count("it leaves out the choice of lr")
    assert 2 == page.count("difference from lr=0.1,target=0.2")
    assert "<td>lr=0.2,target=0.2</td><td>-12.00</td>" in page


def test_a_study_ends_with_its_differences(tmp_path, capsys):
    path = tmp_path / "study"
    path.mkdir()
    scores = {"a": [90.0, 91.0, 95.0], "b": [91.0, 93.0, 98.0]}
    trainings = {
        f"{arm}-seed{seed}": {"arm": arm, "seed": seed, "epochs": 1, "policy": "fixed"}
        for arm in scores
        for seed in range(3)
    }
    (path / "study.json").write_bytes(study_json(trainings))
    for name, settings in trainings.items():
        score = scores[settings["arm"]][settings["seed"]]
        write_log(path / name, [row(1, metrics={ACCURACY: score})], settings)
    report_study(path, LiveView())
    out = capsys.readouterr().out
    assert out.index("standard deviation") < out.index("difference from a, paired by seed, 95 %")
    assert "[-0.48, +4.48]" in out


@pytest.mark.parametrize("command", ["report", "compare"])
def test_the_commands_of_logs_take_the_folder_of_a_sweep(bigbatch, tmp_path, command):
    sweep(tmp_path / "sweep", SWEPT)
    status, out, err = bigbatch(command, tmp_path / "sweep")
    assert (0, "") == (status, err)
    page = out if command == "compare" else (tmp_path / "sweep" / "report.html").read_text()
    for name in ("lr=0.1,target=0.2", "lr=0.2,target=0.4"):
        assert name in page.replace("\n", "")


def test_the_figure_has_a_point_with_its_error_bar_for_each_shown_point_and_the_front(tmp_path):
    results = sweep(tmp_path / "sweep", SWEPT)
    front, group = sweep_panel(results, (400, 300)).series
    assert [point.average_batch for point in results.front] == front.x
    assert ("step", NEUTRAL) == (front.kind, front.style)
    assert "every point" == group.name
    assert 4 == len(group.x) == len(group.low) == len(group.notes)
    write_sweep(results, tmp_path)
    figure = ElementTree.fromstring((tmp_path / "sweep.svg").read_text())
    notes = [one.text for one in figure.iter("{http://www.w3.org/2000/svg}title")]
    assert [*group.notes] == notes


def test_the_page_has_the_figure_for_wide_and_narrow_windows(tmp_path):
    results = sweep(tmp_path / "sweep", SWEPT)
    write_sweep(results, tmp_path)
    page = (tmp_path / "report.html").read_text()
    for kind, size in (("wide", (900, 440)), ("narrow", (380, 400))):
        assert f'<figure class="{kind}">' in page
        assert svg([sweep_panel(results, size)], key=True, titles=False) in page
