"""Tuning: samples held out of the training data, seeds of its own, and what is then shown."""

import json
from dataclasses import replace

import pytest
import torch

from bigbatch.errors import SettingError
from bigbatch.log.history import history_of
from bigbatch_recipes.char_lm import CHAR_LM
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.study import build_training, start_sweep, trainings_of
from bigbatch_recipes.sweep import points_of, sweep_of
from bigbatch_recipes.sweep_results import read_sweep_results
from bigbatch_recipes.train_run import hold_out
from log_rows import row, write_log

SETTINGS = DIGITS.settings()
ARGUMENTS = ("--grid", "lr=0.02,0.1", "--grid", "policy=fixed,simigrad", "--tune", "lr")


def samples_of(dataset):
    return {tuple(x.flatten().tolist()) for x, _ in (dataset[n] for n in range(len(dataset)))}


def test_held_out_samples_are_not_trained_on(tmp_path):
    whole = DIGITS.data(SETTINGS)
    held_out = SETTINGS.with_changes({"held_out": 300, "seed": 7})
    training = build_training(tmp_path, held_out)
    trained = samples_of(training.data.train)
    assert len(whole.train) - 300 == len(training.data.train)
    assert 300 == len(samples_of(whole.train) - trained)
    assert training.train.batches.samples == len(training.data.train)


def test_the_same_samples_are_held_out_for_every_seed_and_are_what_is_scored(tmp_path):
    parts = []
    for seed in (0, 1):
        settings = SETTINGS.with_changes({"held_out": 300, "seed": seed})
        data = hold_out(DIGITS.data(settings), settings)
        parts.append(samples_of(data.train))
    assert parts[0] == parts[1]
    whole = DIGITS.data(SETTINGS).train
    held_out = [
        n for n in range(len(whole)) if tuple(whole[n][0].flatten().tolist()) not in parts[0]
    ]
    x, labels = whole.__getitems__(held_out)
    torch.manual_seed(0)
    model = DIGITS.model(SETTINGS).eval()
    accuracy = 100 * (model(x).argmax(-1) == labels).double().mean().item()
    assert {"held-out accuracy, %": pytest.approx(accuracy)} == data.scores(model)


def test_windows_of_a_text_are_held_out():
    settings = CHAR_LM.settings().with_changes({"held_out": 50})
    data = hold_out(CHAR_LM.data(settings), settings)
    assert len(CHAR_LM.data(settings).train) - 50 == len(data.train)
    torch.manual_seed(0)
    scores = data.scores(CHAR_LM.model(settings).eval())
    assert ["held-out bits per character"] == list(scores)
    assert 4 < scores["held-out bits per character"] < 9  # of 7 bits before any training


@pytest.mark.parametrize("count", [1347, 5000])
def test_something_must_be_left_to_train_on(tmp_path, count):
    with pytest.raises(SettingError, match=f"held_out={count} leaves none of the 1347"):
        build_training(tmp_path, SETTINGS.with_changes({"held_out": count}))


def test_a_recipe_that_cannot_score_training_samples_refuses():
    data = replace(DIGITS.data(SETTINGS), scores_on=None)
    with pytest.raises(SettingError, match="recipe 'digits' cannot score samples"):
        hold_out(data, SETTINGS.with_changes({"held_out": 10}))


# sweeps

WRONG = [
    (("--tune-seeds", "2"), "tune-seeds needs held_out"),
    (("--tune-seeds", "2", "--held-out", "300", "--seeds", "2000"), "seeds=2000 must be at most"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: " ".join(value))
def test_tuning_that_cannot_work_is_one_line(bigbatch, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch("sweep", "digits", *ARGUMENTS, *arguments, "--quiet")
    assert (2, "") == (status, out)
    assert message in err
    assert [] == list(tmp_path.iterdir())


def test_tuning_without_a_setting_to_tune_is_refused(bigbatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("--grid", "lr=0.1,0.2", "--tune-seeds", "2", "--held-out", "300")
    status, _, err = bigbatch("sweep", "digits", *arguments)
    assert 2 == status
    assert "tune-seeds has no effect without --tune" in err


def test_a_dry_run_counts_both_kinds_of_trainings(bigbatch):
    arguments = (*ARGUMENTS, "--tune-seeds", "2", "--held-out", "300", "--seeds", "5")
    status, out, _ = bigbatch("sweep", "digits", *arguments, "--dry-run")
    assert 0 == status
    said = " ".join(out.split())
    assert "8 trainings tune over 2 seeds each, and then 10 train 2 points over 5 seeds" in said


@pytest.fixture
def tuned(tmp_path):
    """A sweep whose tuning prefers 0.1 for the target 0.2, and 0.02 for 0.4."""
    grid = ["lr=0.02,0.1", "target=0.2,0.4"]
    settings = SETTINGS.with_changes({"held_out": 300, "epochs": 1})
    found = points_of(DIGITS, sweep_of(DIGITS, settings, grid, ["lr"]), settings)
    path = tmp_path / "sweep"
    start_sweep(DIGITS, path, found, ["lr"], seeds=2, tune_seeds=2)
    trainings = trainings_of(DIGITS, found, 2, 2)
    for name, one in trainings.items():
        best = (one.lr == 0.1) == (one.target == 0.2)
        if one.held_out:
            assert one.seed in (1000, 1001)
            score = {"held-out accuracy, %": 90.0 if best else 80.0}
        elif best:
            score = {"test accuracy, %": 10.0 + one.seed}
        else:
            continue
        write_log(path / name, [row(1, metrics=score)], one.as_dict())
    assert 16 == len(trainings)
    return path


def test_held_out_scores_choose_and_fresh_seeds_are_shown(tuned):
    sweep = read_sweep_results(tuned)
    table = sweep.table()
    assert ("lr", "target", "test accuracy, %") == table.columns[:3]
    assert [("0.1", "0.2", "10.50 ± 0.71"), ("0.02", "0.4", "10.50 ± 0.71")] == [
        cells[:3] for cells in table.rows
    ]
    assert ["2", "2"] == [cells[-1] for cells in table.rows]
    assert "chosen on held-out training samples with seeds 1000 to 1001" in sweep.title
    assert ["lr=0.1,target=0.2 (lr)", "lr=0.02,target=0.4 (lr)"] == sweep.at_edges
    assert 4 == len(sweep.begun)  # the curves of seeds that are shown
    first = sweep.points[0]
    assert [1000, 1001] == [run.seed for run in first.tuning]
    assert [] == first.runs


def test_tuning_runs_without_a_score_lose(tuned):
    for seed in (1000, 1001):
        (log,) = tuned.glob(f"lr=0.1,target=0.2-seed{seed}/metrics.jsonl")
        log.write_text(json.dumps(row(1, metrics={"held-out accuracy, %": None})) + "\n")
    assert {0.02} == {point.values["lr"] for point in read_sweep_results(tuned).shown}


@pytest.mark.thorough
def test_a_tuned_sweep_trains_every_point_briefly_and_the_best_on_all_data(bigbatch, tmp_path):
    path = tmp_path / "sweep"
    arguments = ("--grid", "lr=0.000001,0.1", "--grid", "policy=fixed,simigrad", "--tune", "lr")
    tuning = ("--tune-seeds", "1", "--held-out", "300", "--seeds", "2", "--set", "epochs=1")
    status, _, _ = bigbatch(
        "sweep",
        "digits",
        *arguments,
        *tuning,
        "--run-dir",
        str(path),
        "--evaluate-every",
        "200 samples",
    )
    assert 0 == status
    names = {folder.name for folder in path.iterdir() if folder.is_dir()}
    tuning_runs = {name for name in names if name.endswith("seed1000")}
    assert 4 == len(tuning_runs)
    expected = {f"lr=0.1,policy={p}-seed{n}" for p in ("fixed", "simigrad") for n in (0, 1)}
    assert expected == names - tuning_runs
    rows = history_of(path / min(names - tuning_runs)).rows
    assert 6 <= sum(one["metrics"] is not None for one in rows) <= 7  # of 1,347 samples
    replayed = bigbatch(
        *("train", "digits", "--policy", "schedule", "--epochs", "1", "--seed", "0"),
        *(
            "--replay-from",
            str(path / "*simigrad*-seed[0-9]"),
            "--run-dir",
            str(tmp_path / "replay"),
        ),
    )
    assert 0 == replayed[0], replayed
    own = history_of(next(path.glob("*simigrad*-seed1"))).rows
    assert len(own) == pytest.approx(len(history_of(tmp_path / "replay").rows), rel=0.1)


def test_a_replay_needs_runs_of_another_seed(tuned, bigbatch):
    pattern = str(tuned / "lr=0.1,target=0.2-seed0")
    arguments = ("--policy", "schedule", "--replay-from", pattern, "--seed", "0")
    status, _, err = bigbatch("train", "digits", *arguments)
    assert 2 == status
    assert "names 1 runs, none of another seed than 0" in err
    status, _, err = bigbatch("train", "digits", *arguments, "--batch-schedule", "32")
    assert 2 == status
    assert "takes the place of batch_schedule" in err
