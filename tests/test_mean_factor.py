"""A run at the mean rate that a VR optimizer had."""

import json
from dataclasses import replace

import pytest

from bigbatch.errors import RunError
from bigbatch.recipes import RECIPES
from bigbatch.recipes.digits import DIGITS
from bigbatch.recipes.mean_factor import mean_factor

SHORT = ("--epochs", "1", "--batch-size", "256", "--policy", "fixed", "--quiet")


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def mean_r(run):
    means = [layer[0] for row in rows_of(run) for layer in row["factors"].values()]
    return sum(means) / len(means)


@pytest.fixture
def twin(bigbatch, tmp_path):
    """A short run with variance reduction."""
    place = tmp_path / "twin"
    assert 0 == bigbatch("train", *SHORT, "--optimizer", "vr-momentum", "--out", place)[0]
    return place


def test_a_run_takes_its_rate_times_the_mean_r_of_another(bigbatch, tmp_path, twin):
    control = tmp_path / "control"
    assert 0 == bigbatch("train", *SHORT, "--lr-from", twin, "--out", control)[0]
    share = mean_r(twin)
    assert 0.1 < share < 0.9
    expected = [[lr * share for lr in row["lr"]] for row in rows_of(twin)]
    assert expected == [pytest.approx(row["lr"]) for row in rows_of(control)]


def test_a_study_takes_the_mean_r_of_the_same_seed(bigbatch, tmp_path, monkeypatch):
    fixed = {"policy": "fixed", "batch_size": 256}
    arms = {
        "twin": {**fixed, "optimizer": "vr-momentum"},
        "control": {**fixed, "optimizer": "momentum", "lr_from": "twin"},
    }
    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, arms=arms))
    study = tmp_path / "study"
    assert 0 == bigbatch("train", "--epochs", "1", "--seeds", "2", "--out", study, "--quiet")[0]
    moved = study.rename(tmp_path / "moved")
    shares = [mean_r(moved / f"twin-seed{seed}") for seed in (0, 1)]
    assert shares[0] != shares[1]
    for seed, share in enumerate(shares):
        of_twin, of_control = (
            rows_of(moved / f"{arm}-seed{seed}")[0]["lr"] for arm in ("twin", "control")
        )
        assert [lr * share for lr in of_twin] == pytest.approx(of_control)


def test_a_control_that_is_resumed_keeps_its_rate(bigbatch, tmp_path, twin):
    control = tmp_path / "control"
    bigbatch("train", *SHORT, "--lr-from", twin, "--out", control)
    expected = [row["lr"] for row in rows_of(control)]
    (control / "checkpoint.pt").unlink()
    assert 0 == bigbatch("train", "--resume", control, "--quiet")[0]
    assert expected == [row["lr"] for row in rows_of(control)]


def test_a_run_without_r_or_an_unfinished_one_is_refused(bigbatch, tmp_path, twin):
    plain = tmp_path / "plain"
    bigbatch("train", *SHORT, "--out", plain)
    with pytest.raises(RunError, match="plain has no factors r; take a run with a VR optimizer"):
        mean_factor(plain)
    lines = (twin / "metrics.jsonl").read_text().splitlines(keepends=True)
    (twin / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(RunError, match="twin is not finished, so its mean r is not known"):
        mean_factor(twin)
    with pytest.raises(RunError, match="there is no run directory"):
        mean_factor(tmp_path / "none")
