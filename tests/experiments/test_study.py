"""The digits study as a whole."""

import json
import shutil

import pytest

from torchrun import alone

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of two seeds, and what the command printed."""
    runs = tmp_path_factory.mktemp("runs")
    one_epoch = ("--epochs", "1", "--seeds", "2", "--runs", runs)
    finished = alone("-m", "bigbatch", "train", *one_epoch)
    assert 0 == finished.returncode, finished.stderr
    return runs / "digits-1", finished.stdout


def test_the_study_trains_every_arm_on_the_same_samples_and_tells_what_happened(study):
    study, out = study
    arms = ("fixed-32", "fixed-512", "schedule", "noise-scale", "simigrad", "simigrad-vr")
    for arm in arms:
        assert arm in out.replace("\n", "")
        for seed in (0, 1):
            run = study / f"{arm}-seed{seed}"
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert 1347 == rows[-1]["samples"] == sum(row["batch_size"] for row in rows)
            assert (run / "report.html").exists()
    page = (study / "report.html").read_text()
    assert all(f"<td>{arm}</td>" in page for arm in arms)
    assert "standard deviation over 2 seeds" in page


def test_a_study_resumes_its_unfinished_runs(bigbatch, study, tmp_path):
    study = shutil.copytree(study[0], tmp_path / "study")
    kept = study / "fixed-32-seed0" / "metrics.jsonl"
    unfinished = study / "simigrad-seed1"
    before, expected = kept.read_bytes(), (unfinished / "metrics.jsonl").read_text()
    (unfinished / "checkpoint.pt").unlink()
    assert 0 == bigbatch("train", "--resume", study, "--quiet")[0]
    assert before == kept.read_bytes()

    def without_time(text):
        return [{**json.loads(line), "seconds": None} for line in text.splitlines()]

    again = (unfinished / "metrics.jsonl").read_text()
    assert without_time(expected) == without_time(again)
