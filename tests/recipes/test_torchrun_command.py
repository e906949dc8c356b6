"""The command under the real torchrun: the same curve, one run directory, one voice."""

import json
from pathlib import Path

import pytest
import torch

from distributed_states import states_of
from dropout_digits import NAME
from torchrun import alone, said, torchrun

EXACT = ["--set", "double=true", "--virtual-ranks", "4"]  # the same run on 1, 2 and 4 ranks
DIGITS = ["-m", "bigbatch", "train", "digits", "--policy", "simigrad", *EXACT]
TESTED = [
    str(Path(__file__).parents[2] / "tests" / "helpers" / "dropout_digits.py"),
    "train",
]  # one that can be killed
LENGTH = ["--epochs", "2", "--checkpoint-every", "5 steps"]
KILLED_AT = 34  # backwards on one of two ranks, two a step: in step 17

pytestmark = pytest.mark.thorough


def rows_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "elapsed_seconds": None} for line in lines]


def assert_same_curve(expected, actual):
    """As close as float64 sums in another order come; batch sizes are whole numbers."""
    names = ("samples", "batch_size", "target_batch_size", "loss", "grad_sqnorm", "grad_variance")
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert pytest.approx(one["metrics"]) == other["metrics"]
        wanted = {name: one[name] or 0.0 for name in names}
        assert pytest.approx(wanted, rel=1e-9, abs=1e-12) == {
            name: other[name] or 0.0 for name in names
        }


def leaves_of(run):
    """Every leaf of a checkpoint, tensors as lists, but the time that was spent."""
    state = torch.load(run / "checkpoint.pt", weights_only=True)["state"]
    states = states_of(state["train"])
    for each in states:
        each["own"] |= {"elapsed_seconds": None, "step_seconds": None}
    return leaves(state | {"train": states})


def leaves(state, path=""):
    if isinstance(state, torch.Tensor):
        return {path: state.tolist()}
    if not isinstance(state, dict | list | tuple):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {
        place: leaf
        for name, value in items
        for place, leaf in leaves(value, f"{path}/{name}").items()
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A training of the digits without torchrun."""
    place = tmp_path_factory.mktemp("alone") / "run"
    assert 0 == alone(*DIGITS, *LENGTH, "--run-dir", place).returncode
    return place


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.release)])
def test_ranks_leave_what_one_process_leaves(one_process, tmp_path, ranks):
    place = tmp_path / "run"
    result = torchrun(ranks, *DIGITS, *LENGTH, "--run-dir", place)
    assert (0, []) == (result.returncode, said(result))
    assert 1 == result.stdout.count("average") == result.stdout.count("report: ")
    assert [place] == list(tmp_path.iterdir())
    left = {path.name for path in one_process.iterdir()} | {"launch.txt"}
    assert left == {path.name for path in place.iterdir()}
    assert 1 == len(list((place / "events").iterdir()))
    assert_same_curve(rows_of(one_process), rows_of(place))


@pytest.mark.release
def test_three_ranks_share_the_samples_of_twelve(tmp_path):
    settings = ["--epochs", "1", "--min-batch", "64", "--batch-size", "64", "--quiet"]
    result = torchrun(3, *DIGITS, *settings, "--run-dir", tmp_path / "three")
    assert 0 == result.returncode
    (note,) = said(result)
    assert "virtual_ranks=4 is no multiple of the 3 ranks, so 12 are used" in note
    alone(*DIGITS, *settings, "--virtual-ranks", "12", "--run-dir", tmp_path / "one")
    assert 1347 == rows_of(tmp_path / "three")[-1]["samples"]
    assert_same_curve(rows_of(tmp_path / "one"), rows_of(tmp_path / "three"))


@pytest.mark.release
def test_after_a_kill_the_other_workers_continue_as_if_there_was_none(tmp_path):
    settings = [*TESTED, NAME, "--policy", "simigrad", *LENGTH, "--quiet"]
    whole = tmp_path / "whole"
    assert 0 == torchrun(2, *settings, "--run-dir", whole).returncode
    killed = torchrun(
        2, *settings, "--runs-dir", tmp_path / "runs", restarts=1, killed_at=KILLED_AT
    )
    assert (0, 1) == (killed.returncode, killed.stdout.count("average"))
    assert killed.stderr.count("another rank was lost") <= 1  # torchrun may end the other first
    (place,) = (tmp_path / "runs").iterdir()
    assert rows_of(whole) == rows_of(place)
    assert leaves_of(whole) == leaves_of(place)


@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restart_continues_where_no_store_outlives_the_workers(tmp_path, ranks):
    settings = [*TESTED, NAME, "--policy", "simigrad", *LENGTH, "--quiet"]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    place = tmp_path / "run"
    result = torchrun(ranks, *settings, "--run-dir", place, restarts=1, killed_at=KILLED_AT, **own)
    assert (0, 1) == (result.returncode, result.stdout.count("average")), result.stderr
    assert f"bigbatch: note: continuing with {place}, which launch" in result.stderr
    assert 2694 == rows_of(place)[-1]["samples"]


@pytest.mark.release
def test_one_rank_that_is_killed_continues(tmp_path):
    settings = [*TESTED, NAME, "--policy", "simigrad", *LENGTH, "--quiet"]
    result = torchrun(1, *settings, "--run-dir", tmp_path / "run", restarts=1, killed_at=KILLED_AT)
    assert (0, []) == (result.returncode, said(result)), result.stderr
    assert 2694 == rows_of(tmp_path / "run")[-1]["samples"]


def test_a_rank_that_fails_is_named_with_its_error_and_the_remedy(tmp_path):
    settings = [*TESTED, NAME, "--policy", "simigrad", *LENGTH, "--quiet"]
    result = torchrun(2, *settings, "--run-dir", tmp_path / "run", RAISES_AT=str(KILLED_AT))
    assert 0 != result.returncode
    (line,) = (line for line in said(result) if line.startswith("bigbatch: rank"))
    assert "another rank was lost" not in result.stderr
    assert "rank 1 of 2: RuntimeError: DefaultCPUAllocator: can't allocate memory; " in line
    assert "this micro-batch on rank 1 of 2 had" in line
    assert 1 == result.stderr.count("in loss_of")  # its traceback; torchrun has one too


@pytest.mark.release
def test_help_is_printed_once():
    result = torchrun(2, "-m", "bigbatch", "train", "--help")
    assert (0, 1) == (result.returncode, result.stdout.count("Usage: "))


@pytest.mark.release
def test_a_run_of_two_ranks_continues_alone_with_the_same_samples(one_process, tmp_path):
    place = tmp_path / "run"
    settings = [*TESTED, "digits", "--policy", "simigrad", *LENGTH, "--run-dir", place]
    assert 0 != torchrun(2, *settings, killed_at=KILLED_AT).returncode
    assert 0 < len(rows_of(place)) < len(rows_of(one_process))
    result = alone("-m", "bigbatch", "train", "--resume", place)
    assert 0 == result.returncode
    assert "the state is that of rank 0 of 2" in result.stderr
    assert_same_curve(rows_of(one_process), rows_of(place))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(  # on all ranks
            ["--target", "1.5"], "target=1.5 must be a number in (-1, 1)", marks=pytest.mark.release
        ),
        (["--run-dir", "mine"], "mine is already in use; nothing was overwritten"),  # on rank 0
    ],
)
def test_an_error_is_said_once_and_ends_all(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    result = torchrun(2, *DIGITS, *options)
    assert 0 != result.returncode
    (line,) = said(result)
    assert message in line
    assert ["mine"] == [path.name for path in tmp_path.iterdir()]
