"""Open-loop replay: the mean trajectory of runs as a schedule, against hand-made logs."""

from statistics import fmean

import pytest

from bigbatch.errors import RunError
from bigbatch.policies.policy import TrainingState
from bigbatch_recipes.earlier_runs import mean_schedule, replay_of
from log_rows import add_rows, row, write_log


@pytest.fixture
def run_with(tmp_path):
    """Writes a run with steps of these sizes, the last one scored."""

    def write(name, sizes, skipped=(), finished=True):
        run = write_log(tmp_path / name, [], {"policy": "fixed", "epochs": 1})
        samples = 0
        for step, size in enumerate(sizes, start=1):
            samples += size
            metrics = {"accuracy": 1.0} if finished and step == len(sizes) else None
            add_rows(
                run,
                [row(step, batch=size, samples=samples, metrics=metrics, skipped=step in skipped)],
            )
        return run

    return write


def followed(policy, samples):
    """The sizes of the steps that a training of so many samples takes with the policy."""
    sizes, seen = [], 0
    while seen < samples:
        now = TrainingState(1, 1, samples=seen, steps=len(sizes))
        sizes.append(min(policy.decide(None, now).batch_size, samples - seen))
        seen += sizes[-1]
    return sizes


def test_one_run_is_repeated(run_with):
    sizes = [100] * 50 + [200] * 25
    assert sizes == followed(replay_of(run_with("run", sizes)), 10_000)
    assert "100, 200 from 5000 samples" == replay_of(run_with("again", sizes)).text


def test_the_mean_has_the_mean_number_of_steps(run_with):
    """Sizes 100 and 400 have a harmonic mean of 160, not 250."""
    runs = run_with("small", [100] * 40), run_with("large", [400] * 10)
    assert "160" == replay_of(*runs).text
    assert fmean([40, 10]) == len(followed(replay_of(*runs), 4000))


def test_growing_runs_are_followed_in_their_mean(run_with):
    """The trajectories grow at different moments; the steps in each half are those of the mean."""
    first = [50] * 100 + [500] * 10
    second = [50] * 20 + [250] * 36
    sizes = followed(replay_of(run_with("first", first), run_with("second", second)), 10_000)
    assert fmean([len(first), len(second)]) == pytest.approx(len(sizes), abs=1)
    before = next(n for n in range(len(sizes)) if sum(sizes[:n]) >= 5000)
    assert fmean([100, 20 + 16]) == pytest.approx(before, abs=1)


def test_a_skipped_step_is_drawn_as_well(run_with):
    assert "50" == replay_of(run_with("skipping", [50] * 40, range(1, 41, 2))).text


def test_runs_that_cannot_be_averaged_are_refused(run_with, tmp_path):
    whole = run_with("whole", [100] * 5)
    with pytest.raises(RunError, match="unfinished is not finished"):
        replay_of(whole, run_with("unfinished", [100] * 5, finished=False))
    with pytest.raises(RunError, match="runs of 400 and 500 samples"):
        replay_of(whole, run_with("short", [100] * 4))
    with pytest.raises(RunError, match="no run to replay"):
        mean_schedule([])
    with pytest.raises(RunError):
        replay_of(tmp_path / "nowhere")


def test_fewer_samples_than_parts(run_with):
    assert [5, 5] == followed(replay_of(run_with("tiny", [5, 5])), 10)
