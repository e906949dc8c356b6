"""A run at the mean rate that a VR optimizer had."""

import json
import shutil
from dataclasses import replace

import pytest

from bigbatch.errors import RunError
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.earlier_runs import mean_factor
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.train_run import Training, train_run

SHORT = DIGITS.settings().with_changes(
    {"samples": 200, "epochs": 2, "policy": "fixed", "batch_size": 64, "micro_batch": 16}
)
SIZES = {name: p.numel() for name, p in DIGITS.model(SHORT).named_parameters()}


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def mean_r(run):
    """Of every weight in every step."""
    factors = [row["gsnr"] for row in rows_of(run)]
    every = sum(SIZES[name] * layer[0] for row in factors for name, layer in row.items())
    return every / sum(SIZES[name] for row in factors for name in row)


@pytest.fixture(scope="module")
def vr_arm(tmp_path_factory):
    """A short run with variance reduction."""
    settings = SHORT.with_changes({"optimizer": "vr-momentum"})
    run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "vr_arm", settings.as_dict())
    train_run(Training(DIGITS, settings), run, LiveView(quiet=True), "vr_arm")
    return run.path


def test_a_run_takes_its_rate_times_the_mean_r_of_another(vr_arm):
    share = mean_r(vr_arm)
    assert 0.1 < share < 0.9
    assert pytest.approx(share) == mean_factor(vr_arm, SIZES)
    control = Training(DIGITS, SHORT.with_changes({"lr": 0.3, "lr_control_from": str(vr_arm)}))
    assert pytest.approx(0.3 * share) == control.optimizer.param_groups[0]["lr"]


def test_a_control_is_one_option_of_the_command(bigbatch, tmp_path, vr_arm, monkeypatch):
    monkeypatch.chdir(vr_arm.parent)
    options = (
        "--set",
        "samples=100",
        "--epochs",
        "1",
        "--policy",
        "fixed",
        "--batch-size",
        "64",
        "--lr",
        "0.5",
    )
    run = tmp_path / "run"
    assert (
        0
        == bigbatch(
            "train", *options, "--lr-control-from", vr_arm.name, "--quiet", "--run-dir", run
        )[0]
    )
    scaling = (64 / 32) ** 0.5
    assert pytest.approx(0.5 * scaling * mean_r(vr_arm)) == rows_of(run)[0]["lr"][0]


@pytest.mark.release
def test_a_study_takes_the_mean_r_of_the_same_seed(bigbatch, tmp_path, monkeypatch):
    fixed = {"policy": "fixed", "batch_size": 64, "micro_batch": 16}
    arms = {
        "vr_arm": {**fixed, "optimizer": "vr-momentum"},
        "control": {**fixed, "optimizer": "momentum", "lr_control_from": "vr_arm"},
    }
    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, arms=arms))
    study = tmp_path / "study"
    options = ("--set", "samples=200", "--epochs", "1", "--seeds", "2", "--quiet")
    assert 0 == bigbatch("train", *options, "--run-dir", study)[0]
    shares = [mean_r(study / f"vr_arm-seed{seed}") for seed in (0, 1)]
    assert shares[0] != shares[1]
    for seed, share in enumerate(shares):
        of_vr_arm, of_control = (
            rows_of(study / f"{arm}-seed{seed}")[0]["lr"] for arm in ("vr_arm", "control")
        )
        assert [lr * share for lr in of_vr_arm] == pytest.approx(of_control)


def changed_copy(vr_arm, place, change):
    """A copy of a run with other rows in its log."""
    shutil.copytree(vr_arm, place)
    rows = change(rows_of(vr_arm))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_a_run_without_r_is_refused(vr_arm, tmp_path):
    def without(rows):
        return [{name: row[name] for name in row.keys() - {"gsnr"}} for row in rows]

    plain = changed_copy(vr_arm, tmp_path / "plain", without)
    with pytest.raises(RunError, match="plain has no factors r; take a run with a VR optimizer"):
        mean_factor(plain, SIZES)


def test_a_run_of_another_network_is_refused(vr_arm):
    with pytest.raises(RunError, match=r"vr_arm has a layer .*, which this network lacks"):
        mean_factor(vr_arm, {"head": 10})


def test_an_unfinished_run_is_refused(vr_arm, tmp_path):
    part = changed_copy(vr_arm, tmp_path / "part", lambda rows: rows[:-1])
    with pytest.raises(RunError, match="part is not finished, so its mean r is not known"):
        mean_factor(part, SIZES)


def test_a_run_that_there_is_not_is_named(tmp_path):
    with pytest.raises(RunError, match="there is no run directory"):
        mean_factor(tmp_path / "none", SIZES)
