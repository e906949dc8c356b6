"""The digits study as a whole."""

import json

import pytest

pytestmark = pytest.mark.thorough


def test_the_study_trains_every_arm_on_the_same_samples_and_tells_what_happened(bigbatch, tmp_path):
    status, out, _ = bigbatch("train", "--epochs", "2", "--seeds", "2", "--runs", tmp_path)
    assert 0 == status
    study = tmp_path / "digits-1"
    arms = ("fixed-32", "fixed-512", "schedule", "noise-scale", "simigrad", "simigrad-vr")
    for arm in arms:
        assert arm in out.replace("\n", "")
        for seed in (0, 1):
            run = study / f"{arm}-seed{seed}"
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert 2 * 1347 == rows[-1]["samples"] == sum(row["batch_size"] for row in rows)
            assert (run / "report.html").exists()
    page = (study / "report.html").read_text()
    assert all(f"<td>{arm}</td>" in page for arm in arms)
    assert "standard deviation over 2 seeds" in page


def test_a_study_resumes_its_unfinished_runs(bigbatch, tmp_path):
    bigbatch("train", "--epochs", "1", "--seeds", "1", "--out", tmp_path / "study", "--quiet")
    kept = tmp_path / "study" / "fixed-32-seed0" / "metrics.jsonl"
    unfinished = tmp_path / "study" / "simigrad-seed0"
    before, expected = kept.read_bytes(), (unfinished / "metrics.jsonl").read_text()
    (unfinished / "checkpoint.pt").unlink()
    assert 0 == bigbatch("train", "--resume", tmp_path / "study", "--quiet")[0]
    assert before == kept.read_bytes()

    def without_time(text):
        return [{**json.loads(line), "seconds": None} for line in text.splitlines()]

    again = (unfinished / "metrics.jsonl").read_text()
    assert without_time(expected) == without_time(again)
