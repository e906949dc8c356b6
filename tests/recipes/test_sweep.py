"""`bigbatch sweep`: grids, what they become, trainings side by side, and what is shown of them."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bigbatch.errors import SettingError
from bigbatch.log.row_schema import METRICS
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.recipe import Sweep
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_config import read_sweep
from bigbatch_recipes.study import start_sweep, trainings_of
from bigbatch_recipes.sweep import points_of, sweep_of
from bigbatch_recipes.sweep_page import sweep_panel, write_sweep
from bigbatch_recipes.sweep_results import read_sweep_results
from log_rows import add_rows, row, write_log

SETTINGS = DIGITS.settings()
SHORT = ("--set", "epochs=1", "--set", "checkpoint_every=5 steps")
SECONDS = 240  # far more than needed: a hang ends as a failure

WRONG = [
    (["--grid", "speed=1,2"], "recipe 'digits' has no setting 'speed'"),
    (["--grid", "lr=fast"], "lr='fast' must be a number"),
    (["--grid", "lr="], "'lr=' must be written KEY=VALUE"),
    (["--grid", "lr=0.1", "--grid", "lr=0.2"], "--grid gives 'lr' twice"),
    (["--grid", "seed=1,2"], "'seed' cannot vary within a sweep: give --seeds instead"),
    (["--grid", "recipe=a,b"], "'recipe' cannot vary"),
    (["--grid", "arm=none"], "arm 'none' is unknown"),
    (["--grid", "optimizer=magic"], "optimizer 'magic' is unknown"),
    (["--grid", "policy=magic"], "policy 'magic' is unknown; choose one of: fixed"),
    (["--grid", "min_batch=512", "--grid", "max_batch=256"], "the sweep has no point"),
    (["--grid", "lr=0.1", "--tune", "target"], "tuned target must be in the grid: lr"),
    (["--resume", "x", "--grid", "lr=0.1"], "--resume does not go together with --grid"),
    (["--set", "lr=0.1"], "the sweep of the recipe has values of lr too; leave one"),
    (["--set", "lr=0.1", "--grid", "lr=0.1,0.2"], "--grid has values of lr too; leave one of"),
    (["--lr", "0.1", "--grid", "lr=0.1,0.2"], "--grid has values of lr too; leave one of them out"),
    (["--grid", "policy=fixed", "--grid", "target=0.1,0.2"], "target has no effect at any point"),
    (["--grid", "dropout=0.0,2.0"], "cannot be built with dropout=2.0, double=False: dropout prob"),
    (["--grid", "r_max=1,10", "--grid", "lr=0.1"], "r_max has no effect at any point"),
    (["--resume", "nowhere"], "nowhere holds no sweep"),
    (["--grid", "lr=0.1", "--jobs", "0"], "--jobs"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: " ".join(value))
def test_a_bad_grid_is_one_line_and_writes_nothing(
    bigbatch, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch("sweep", *arguments)
    assert (2, "") == (status, out)
    assert message in err
    assert 1 == err.count("\n")
    assert [] == list(tmp_path.iterdir())


def points(*texts, tuned=(), settings=SETTINGS):
    return points_of(DIGITS, sweep_of(DIGITS, settings, texts, tuned), settings)


def test_a_grid_is_a_product_named_by_what_varies():
    found = points("lr=0.01,0.1", "target=0.2,0.4", "optimizer=momentum")
    assert [
        "lr=0.01,target=0.2",
        "lr=0.01,target=0.4",
        "lr=0.1,target=0.2",
        "lr=0.1,target=0.4",
    ] == [point.name for point in found]
    assert {"lr": 0.1, "target": 0.2} == found[2].values
    assert (0.1, 0.2) == (found[2].settings.lr, found[2].settings.target)


def test_values_with_commas_are_parted_by_bars_and_make_file_names():
    found = points(
        "policy=schedule", "batch_schedule=64, 128 from 1K samples|32, x2 every 5 epochs"
    )
    assert ["batch_schedule=64-128-from-1K-samples", "batch_schedule=32-x2-every-5-epochs"] == [
        point.name for point in found
    ]
    alike = points("policy=schedule", "batch_schedule=64,128 from 9 steps|64, 128 from 9 steps")
    expected = "batch_schedule=64-128-from-9-steps"
    assert [expected, f"{expected}~2"] == [point.name for point in alike]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max_change=none,auto,1.5", (None, "auto", 1.5)),
        ("every=1,none", (1, None)),
        ("min_micro_batches=none,6", (None, 6)),
    ],
)
def test_values_that_may_be_left_out_vary_and_are_read_again(tmp_path, text, values):
    key, found = text.partition("=")[0], points(text)
    assert values == tuple(point.values[key] for point in found)
    start_sweep(DIGITS, tmp_path / "sweep", found, (), 1)
    trainings, shown = read_sweep(tmp_path / "sweep")
    assert values == tuple(settings[key] for settings in trainings.values())
    assert values == tuple(point[key] for point in shown["points"].values())


def test_points_whose_least_batch_exceeds_their_largest_are_left_out():
    found = points("min_batch=16,64,256", "max_batch=64,256")
    bounds = [(point.settings.min_batch, point.settings.max_batch) for point in found]
    assert [(16, 64), (16, 256), (64, 64), (64, 256), (256, 256)] == bounds


def test_the_same_point_of_two_grids_is_trained_once():
    sweep = Sweep(({"lr": (0.1, 0.2)}, {"lr": (0.2, 0.3), "momentum": (0.9,)}))
    assert [0.1, 0.2, 0.3] == [p.settings.lr for p in points_of(DIGITS, sweep, SETTINGS)]


def test_what_has_no_effect_at_a_point_does_not_vary_there():
    found = points("policy=fixed,simigrad", "target=0.2,0.4", "batch_size=32,64")
    assert [
        "policy=fixed,batch_size=32",
        "policy=fixed,batch_size=64",
        "policy=simigrad,target=0.2,batch_size=32",
        "policy=simigrad,target=0.2,batch_size=64",
        "policy=simigrad,target=0.4,batch_size=32",
        "policy=simigrad,target=0.4,batch_size=64",
    ] == [point.name for point in found]


def test_an_arm_brings_its_changes_and_the_grid_changes_them():
    first, second = points("arm=fixed-32,simigrad-vr", "lr=0.5")
    assert ("fixed", "momentum", 0.5) == tuple(
        getattr(first.settings, name) for name in ("policy", "optimizer", "lr")
    )
    assert "vr-momentum" == second.settings.optimizer


@pytest.mark.thorough
def test_every_recipe_sweeps_what_it_can_train():
    for recipe in RECIPES.values():
        # where nothing is small there is one scale
        for one in (recipe, recipe.at_scale(paper=True)) if recipe.small else (recipe,):
            found = points_of(one, one.sweep, one.settings())
            assert len({point.name for point in found}) == len(found) > 1
            trainings_of(one, found, 1)  # every run that another needs is there


def test_a_run_begins_from_the_one_of_the_same_values_and_seed():
    arms = {"first": {}, "second": {"init_from": "first"}}
    recipe = replace(DIGITS, arms=arms)
    sweep = sweep_of(recipe, SETTINGS, ["arm=first,second", "lr=0.1,0.2"], [])
    trainings = trainings_of(recipe, points_of(recipe, sweep, SETTINGS), 2)
    assert 8 == len(trainings)
    assert "arm=first,lr=0.2-seed1" == trainings["arm=second,lr=0.2-seed1"].init_from
    assert "" == trainings["arm=first,lr=0.2-seed1"].init_from
    alone = points_of(recipe, sweep_of(recipe, SETTINGS, ["arm=second"], []), SETTINGS)
    with pytest.raises(SettingError, match="needs arm 'first' of the same values"):
        trainings_of(recipe, alone, 1)


def test_a_run_from_elsewhere_may_be_that_of_the_own_seed():
    settings = SETTINGS.with_changes({"lr_control_from": "/runs/vr-seed{seed}"})
    found = points_of(DIGITS, sweep_of(DIGITS, settings, ["lr=0.1"], []), settings)
    trainings = trainings_of(DIGITS, found, 2)
    assert {"all-seed0": "/runs/vr-seed0", "all-seed1": "/runs/vr-seed1"} == {
        name: one.lr_control_from for name, one in trainings.items()
    }


def test_a_dry_run_lists_the_points_and_writes_nothing(bigbatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("--grid", "lr=0.1,0.2", "--grid", "target=0.2,0.4", "--tune", "lr", "--seeds", "2")
    status, out, _ = bigbatch("sweep", "digits", *arguments, "--dry-run")
    assert 0 == status
    assert "lr=0.1,target=0.4\n" in out
    assert "4 points, of which each shows the best lr; 8 trainings over 2 seeds each" in out
    assert [] == list(tmp_path.iterdir())


def test_a_dry_run_needs_no_data(bigbatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch("sweep", "imagenet-resnet50", "--dry-run")
    assert (0, "") == (status, err)
    assert "5 points; 15 trainings" in out


def test_a_sweep_that_fails_altogether_says_why(bigbatch, tmp_path, monkeypatch):
    """By directories that are no runs, so that nothing is trained."""
    monkeypatch.chdir(tmp_path)
    start_sweep(DIGITS, tmp_path / "sweep", points("lr=0.1,0.2"), (), 1)
    for name in ("lr=0.1-seed0", "lr=0.2-seed0"):
        (tmp_path / "sweep" / name).mkdir()
    status, out, _ = bigbatch("sweep", "--resume", "sweep", "--quiet", "--jobs", "1")
    assert 1 == status
    said = " ".join(out.split())
    assert "no run has logged a step" in said
    for name in ("lr=0.1-seed0", "lr=0.2-seed0"):
        assert f"{name} failed: sweep/{name}/settings.json cannot be read as the settings" in said


def swept(path, scores, *, higher=True, tuned=("lr",), losses=None):
    """A sweep of two seeds, with scores by (lr, target); None for a run that is not there.

    `losses` are those of the last step where they are not 1.
    """
    recipe = replace(DIGITS, higher_is_better=higher)
    settings = SETTINGS.with_changes({"epochs": 1})
    found = points("lr=0.1,0.2", "target=0.2,0.4", tuned=tuned, settings=settings)
    start_sweep(recipe, path, found, tuned, 2)
    for name, training in trainings_of(recipe, found, 2).items():
        score = scores[training.lr, training.target][training.seed]
        if score is not None:
            batch = round(100 * training.target)
            lost = (losses or {}).get((training.lr, training.target), 1.0)
            one = row(2, batch=batch, accuracy=score, loss=lost)
            if math.isnan(score):  # as a log has what is not a number
                one["metrics"] = dict.fromkeys(one["metrics"])
            rows = [row(1, batch=batch, loss=1.0), one]
            write_log(path / name, rows, training.as_dict())
    return read_sweep_results(path)


SCORES = {
    (0.1, 0.2): (0.90, 0.92),
    (0.2, 0.2): (0.99, 0.50),
    (0.1, 0.4): (0.70, 0.72),
    (0.2, 0.4): (0.80, 0.84),
}


def test_a_tuned_setting_is_shown_at_its_best_mean_score(tmp_path):
    sweep = swept(tmp_path / "sweep", SCORES)
    table = sweep.table()
    assert ("lr", "target", "test accuracy, %", "average batch") == table.columns[:4]
    assert [("0.1", "0.2", "91.00 ± 1.41"), ("0.2", "0.4", "82.00 ± 2.83")] == [
        cells[:3] for cells in table.rows
    ]
    assert sweep.title.startswith(
        "mean ± standard deviation over 2 seeds; lr: the best of each point, chosen on the test "
        "accuracy, %"
    )
    drawn = sweep_panel(sweep, (900, 440)).series[-1]
    assert (91 - 2**0.5, 91 + 2**0.5) == pytest.approx((drawn.low[0], drawn.high[0]))


def test_points_with_another_score_are_tuned_on_their_own(tmp_path):
    found = points("target=0.2,0.4", "lr=0.1,0.2", tuned=("lr",))
    start_sweep(DIGITS, tmp_path / "sweep", found, ("lr",), 1)
    for name, training in trainings_of(DIGITS, found, 1).items():
        score = "F1" if training.target == 0.4 else "accuracy"
        settings = training.with_changes({"epochs": 1}).as_dict()
        write_log(tmp_path / "sweep" / name, [row(1, metrics={score: training.lr})], settings)
    sweep = read_sweep_results(tmp_path / "sweep")
    assert [0.2, 0.2] == [point.values["lr"] for point in sweep.shown]
    assert "chosen on the accuracy or F1" in sweep.title


def test_where_less_is_better_the_least_is_best(tmp_path):
    table = swept(tmp_path / "sweep", SCORES, higher=False).table()
    assert [("0.2", "0.2"), ("0.1", "0.4")] == [cells[:2] for cells in table.rows]


def test_nothing_tuned_shows_every_point(tmp_path):
    assert 4 == len(swept(tmp_path / "sweep", SCORES, tuned=()).table().rows)


def test_a_point_that_lacks_a_run_is_no_best_one_and_says_so(tmp_path):
    scores = {**SCORES, (0.1, 0.2): (0.99, None), (0.2, 0.4): (None, None)}
    rows = swept(tmp_path / "sweep", scores).table().rows
    assert [("0.2", "0.2"), ("0.1", "0.4")] == [cells[:2] for cells in rows]
    lone = swept(tmp_path / "lone", {**scores, (0.2, 0.2): (None, None)}).table().rows
    assert ("0.1", "0.2", "99.00") == lone[0][:3]
    assert "1 of 2" == lone[0][-1]


def test_the_front_has_no_point_that_another_beats(tmp_path):
    falling = swept(tmp_path / "falling", SCORES)
    assert [0.2, 0.4] == [point.values["target"] for point in falling.front]
    rising = {**SCORES, (0.2, 0.4): (0.95, 0.97)}
    assert [0.4] == [p.values["target"] for p in swept(tmp_path / "rising", rising).front]


def test_a_point_of_which_a_run_diverged_is_not_on_the_front(tmp_path):
    scores = {**SCORES, (0.2, 0.4): (math.nan, 0.99), (0.1, 0.4): (math.nan, 0.99)}
    sweep = swept(tmp_path / "sweep", scores)
    assert [0.2] == [point.values["target"] for point in sweep.front]
    assert "99.00 (1 of 2)" in {cells[2] for cells in sweep.table().rows}


def test_runs_that_diverged_are_counted_and_lose_to_all_that_did_not(tmp_path):
    diverged = {(0.1, 0.2): 1e9, (0.1, 0.4): 1e9, (0.2, 0.4): 1e9}
    sweep = swept(tmp_path / "sweep", SCORES, losses=diverged)
    better_but_diverged, worse = (0.1, 0.2), (0.2, 0.2)
    assert sum(SCORES[better_but_diverged]) > sum(SCORES[worse])
    assert [worse, (0.2, 0.4)] == [(p.values["lr"], p.values["target"]) for p in sweep.shown]
    assert ["2", "2, 2 diverged"] == [cells[-1] for cells in sweep.table().rows]
    assert [0.2] == [point.values["target"] for point in sweep.front]
    write_sweep(sweep, tmp_path)
    runs = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert 6 == sum(run["diverged"] == "True" for run in runs)
    texts = [text for one in sweep_panel(sweep, (900, 440)).series for text in one.notes]
    assert 1 == sum("diverged" in text for text in texts)


def test_of_points_with_the_same_batch_the_best_alone_is_on_the_front(tmp_path):
    scores = {(0.1, 0.2): (0.8, 0.8), (0.2, 0.2): (0.9, 0.9)}
    scores |= {(0.2, 0.4): (0.6, 0.6), (0.1, 0.4): (0.7, 0.7)}
    front = swept(tmp_path / "sweep", scores, tuned=()).front
    assert [(0.2, 0.2), (0.1, 0.4)] == [(p.values["lr"], p.values["target"]) for p in front]


def test_a_point_of_which_a_run_failed_is_not_on_the_front(tmp_path):
    scores = {**SCORES, (0.1, 0.4): (0.99, None), (0.2, 0.4): (0.99, None)}
    assert [0.2] == [p.values["target"] for p in swept(tmp_path / "sweep", scores).front]


def test_a_damaged_run_is_left_out_with_a_note(tmp_path):
    swept(tmp_path / "sweep", SCORES)
    (tmp_path / "sweep" / "lr=0.1,target=0.2-seed0" / "settings.json").unlink()
    (tmp_path / "sweep" / "lr=0.2,target=0.2-seed1" / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.warns(UserWarning, match="is left out") as notes:
        sweep = read_sweep_results(tmp_path / "sweep")
    assert ["lr=0.1,target=0.2-seed0", "lr=0.2,target=0.2-seed1"] == [
        str(note.message).partition(" ")[0] for note in notes
    ]
    assert [1, 2, 1, 2] == [len(point.runs) for point in sweep.points]
    assert 6 == len(sweep.drawn)


@pytest.mark.thorough
def test_a_large_sweep_draws_the_curves_of_its_front_alone(tmp_path):
    settings = SETTINGS.with_changes({"epochs": 1})
    found = points("target=" + ",".join(f"0.{n}" for n in range(10, 41)), settings=settings)
    start_sweep(DIGITS, tmp_path / "sweep", found, (), 2)
    for name, training in trainings_of(DIGITS, found, 2).items():
        rows = [row(1, batch=100, accuracy=training.target)]
        write_log(tmp_path / "sweep" / name, rows, training.as_dict())
    sweep = read_sweep_results(tmp_path / "sweep")
    assert 62 == len(sweep.begun)
    assert ["target=0.4-seed0", "target=0.4-seed1"] == [run.name for run in sweep.drawn]
    for run in sweep.begun[::2]:  # one of each point diverged
        (run / METRICS).write_text("")
        add_rows(run, [row(1, batch=100, metrics={"test accuracy, %": None})])
    half = read_sweep_results(tmp_path / "sweep")
    assert ([], 60) == (half.front, len(half.drawn))


def test_a_sweep_leaves_a_figure_and_a_csv(tmp_path):
    sweep = swept(tmp_path / "sweep", SCORES)
    write_sweep(sweep, tmp_path)
    assert ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")
    runs = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert 8 == len(runs)
    assert ("0.1", "0.2", "1", "92.0") == tuple(
        runs[1][name] for name in ("lr", "target", "seed", "test accuracy, %")
    )


def test_the_page_of_a_sweep_shows_its_points(tmp_path):
    write_sweep(swept(tmp_path / "sweep", SCORES), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "chosen on the test accuracy, %" in page
    assert "<td>91.00 ± 1.41</td>" in page
    assert "best score for at least this batch" in page


def test_a_sweep_under_torchrun_is_refused_and_writes_nothing(bigbatch, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    out = tmp_path / "sweep"
    status, _, err = bigbatch("sweep", "digits", "--grid", "lr=0.1", "--run-dir", out)
    assert 2 == status
    assert "run it without torchrun" in err
    assert not out.exists()


@pytest.mark.thorough
def test_a_failing_point_stops_no_other_and_is_named_with_its_reason(bigbatch, tmp_path):
    place = tmp_path / "sweep"
    grid = ("--grid", "samples=3,300", "--seeds", "1", *SHORT)
    status, out, _ = bigbatch("sweep", "digits", *grid, "--run-dir", place, "--quiet")
    assert 1 == status
    assert "samples=3-seed0 failed: min_batch=16 exceeds the 3 samples of an epoch" in out
    assert f"`bigbatch sweep --resume {place}` tries the 1 failed again" in " ".join(out.split())
    assert (place / "samples=300-seed0" / "report.html").exists()
    assert {"sweep.svg", "sweep.csv", "report.html"} <= {path.name for path in place.iterdir()}
    before = (place / "samples=300-seed0" / "metrics.jsonl").stat().st_mtime_ns
    status, out, _ = bigbatch("sweep", "--resume", place)
    assert 1 == status
    assert "samples=3-seed0 failed" in out
    assert before == (place / "samples=300-seed0" / "metrics.jsonl").stat().st_mtime_ns


def sweeping(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "bigbatch", "sweep", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it after &
    )


def wait_for(process, path, lines=3):
    """Until a training has logged so many steps."""
    while process.poll() is None:
        logs = [file.read_bytes() for file in path.glob("*/metrics.jsonl")]
        if any(log.count(b"\n") >= lines for log in logs):
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def rows_of(study):
    return {
        file.parent.name: [
            {**json.loads(line), "elapsed_seconds": None} for line in file.read_text().splitlines()
        ]
        for file in study.glob("*/metrics.jsonl")
    }


def workers_of(process):
    """The processes of joblib that train."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [pid for pid, command in commands.items() if "popen_loky" in command]


def are_gone(pids):
    """Whether all processes end within some seconds."""
    until = time.monotonic() + SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_training_outlives_its_sweep(tmp_path, number):
    process = sweeping(*GRID, "--set", "epochs=400", "--run-dir", tmp_path / "sweep")
    wait_for(process, tmp_path / "sweep")
    workers = workers_of(process)
    assert 2 == len(workers)
    for pid in (*workers, process.pid) if number == signal.SIGINT else (process.pid,):
        os.kill(pid, number)  # Ctrl-C reaches all of them
    process.communicate(timeout=SECONDS)
    assert are_gone(workers)


@pytest.mark.thorough
def test_a_script_without_a_main_guard_trains_once(tmp_path):
    """A process does not import the script of its caller."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "sweep"], capture_output=True, text=True, check=True
    )
    assert ("begins\n{}\n", "") == (done.stdout, done.stderr)
    assert (tmp_path / "sweep" / "all-seed0" / "report.html").exists()


SCRIPT = """
import sys
from pathlib import Path
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.parallel_runs import train_sweep
from bigbatch_recipes.study import start_sweep
from bigbatch_recipes.sweep import points_of, sweep_of
from bigbatch_recipes.console import LiveView

print("begins")
settings = DIGITS.settings().with_changes({"epochs": 1, "samples": 200})
points = points_of(DIGITS, sweep_of(DIGITS, settings, ["lr=0.1"], ()), settings)
start_sweep(DIGITS, Path(sys.argv[1]), points, (), 1)
print(train_sweep(Path(sys.argv[1]), 1, LiveView(quiet=True)))
"""
EPOCHS = ("--set", "epochs=4")
GRID = ("digits", "--grid", "lr=0.01,0.02", "--seeds", "1", *EPOCHS, "--jobs", "2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.release), signal.SIGINT]
)
def test_a_sweep_that_is_killed_continues_as_if_it_never_was(bigbatch, tmp_path, number):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for lr in (0.01, 0.02):
        one = (
            "--policy",
            SETTINGS.policy,
            "--set",
            f"lr={lr}",
            "--run-dir",
            whole / f"lr={lr}-seed0",
        )
        assert 0 == bigbatch("train", "digits", *one, *EPOCHS)[0]
    process = sweeping(*GRID, "--set", "checkpoint_every=7 steps", "--run-dir", killed)
    wait_for(process, killed)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=SECONDS)
    if number != signal.SIGKILL:
        assert 130 == process.returncode
        assert f"interrupted; `bigbatch sweep --resume {killed}` continues" in err
        assert not any((run / "report.html").exists() for run in killed.glob("lr=*"))
    assert 0 == bigbatch("sweep", "--resume", killed)[0]
    assert rows_of(whole) == rows_of(killed)
    assert 2 == len(list(csv.DictReader((killed / "sweep.csv").open())))
