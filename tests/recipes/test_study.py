"""The digits study as a whole."""

import json

import pytest

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.release)])
def test_a_study_trains_every_arm_tells_what_happened_and_resumes_an_unfinished_run(
    bigbatch, tmp_path, seeds
):
    one_epoch = ("--epochs", "1", "--seeds", seeds, "--runs-dir", tmp_path)
    status, out, _ = bigbatch("train", *one_epoch)
    assert 0 == status
    study = tmp_path / "digits-1"
    assert_every_arm_saw_the_same_samples(study, out, seeds)

    kept = study / "fixed-32-seed0" / "metrics.jsonl"
    unfinished = study / f"simigrad-seed{seeds - 1}"
    before, expected = kept.read_bytes(), (unfinished / "metrics.jsonl").read_text()
    (unfinished / "checkpoint.pt").unlink()
    assert 0 == bigbatch("train", "--resume", study, "--quiet")[0]
    assert before == kept.read_bytes()
    assert without_time(expected) == without_time((unfinished / "metrics.jsonl").read_text())


def assert_every_arm_saw_the_same_samples(study, out, seeds):
    arms = ("fixed-32", "fixed-512", "schedule", "noise-scale", "simigrad", "simigrad-vr")
    for arm in arms:
        assert arm in out.replace("\n", "")
        for seed in range(seeds):
            run = study / f"{arm}-seed{seed}"
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert 1347 == rows[-1]["samples"] == sum(row["batch_size"] for row in rows)
            assert (run / "report.html").exists()
    page = (study / "report.html").read_text()
    assert all(f"<td>{arm}</td>" in page for arm in arms)
    assert seeds == 1 or "standard deviation over 2 seeds" in page


def without_time(text):
    return [{**json.loads(line), "elapsed_seconds": None} for line in text.splitlines()]
