"""A training that diverged is called so, and an honest one never."""

from pathlib import Path

import pytest

from bigbatch.log.history import History

START = 2.3  # of ten classes


def divergence_of(losses, skipped=()):
    rows = [{"loss": loss, "skipped": number in skipped} for number, loss in enumerate(losses)]
    return History(Path(), {}, rows).divergence


def going(start, end, steps=100):
    return [start + (end - start) * step / (steps - 1) for step in range(steps)]


@pytest.mark.parametrize(
    "losses",
    [
        going(START, 0.01),
        going(START, START),  # learns nothing
        going(START, 1.2 * START),
        [START, 6.0, *going(5.0, 1.0)],  # a rate that is high at first
        [START, 50.0, *going(5.0, 1.0)],  # and one that is far too high, which comes back
        [1e-4, *going(1e-3, 5e-3)],  # continues from a finished training
        [1e-4, 1.2, *going(0.1, 0.01)],  # with one hard sample
        [-3.0, *going(-3.0, 9.0)],  # a loss that may be negative has no such scale
        [START],
        [None, *going(START, 1.0)],
        [],
    ],
    ids=range(11),
)
def test_an_honest_training_is_not_called_diverged(losses):
    assert "" == divergence_of(losses)


def test_first_steps_that_are_skipped_are_a_loss_scale_that_settles():
    assert "" == divergence_of(going(START, 0.1), skipped=range(10))


@pytest.mark.parametrize(
    ("losses", "skipped", "reason"),
    [
        (going(START, 2e9), (), "its loss began at 2.3, rose to 2e+09 and ended at 1.9"),
        ([START, 1e16, *going(1800, 1800)], (), "rose to 1e+16 and ended at 1.8e+03"),
        ([START, 9.0, *going(2.4, 2.4)], (), "its loss began at 2.3, rose to 9 and ended at 2.4"),
        ([START, *50 * [None]], (), "5 of its last 5 steps had no finite gradient"),
        ([None] * 3, (), "3 of its last 3 steps had no finite gradient"),
        (going(START, 1.0), range(50, 100), "10 of its last 10 steps had no finite gradient"),
    ],
    ids=["far", "blown", "dead", "nan", "all nan", "skipped"],
)
def test_a_training_that_diverged_is_called_so_with_its_losses(losses, skipped, reason):
    assert reason in divergence_of(losses, skipped)


@pytest.mark.thorough
def test_the_command_says_it_on_the_console_in_the_table_and_in_the_report(bigbatch, tmp_path):
    options = (
        "--lr=1e9",
        "--epochs=1",
        "--seed=0",
        "--quiet",
        "--set=samples=320",
        "--policy=fixed",
    )
    status, out, err = bigbatch("train", "digits", *options, "--run-dir", tmp_path / "run")
    assert 0 == status  # trained to its end, and well kept
    assert 1 == err.count("bigbatch: note: run diverged: ")
    assert "(diverged)" in "".join(out.split())
    assert "(diverged)" in (tmp_path / "run/report.html").read_text()
    _, out, _ = bigbatch("compare", tmp_path / "run")
    assert "(diverged)" in "".join(out.split())
    _, out, err = bigbatch("train", *options[1:], "--run-dir", tmp_path / "honest")
    assert "diverged" not in out + err
