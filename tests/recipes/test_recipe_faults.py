"""What a recipe's training says where something goes wrong, and what it leaves behind."""

import copy
from dataclasses import replace
from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bigbatch.errors import RunError
from bigbatch.gradients import is_of_network, note_waiting
from bigbatch.log.history import history_of
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.train_run import Training, train_run

SETTINGS = DIGITS.settings().with_changes(
    {
        "policy": "fixed",
        "batch_size": 64,
        "micro_batch": 16,  # four in each step, measured or not
        "epochs": 1,
        "checkpoint_every": "5 steps",
    }
)
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def digits(*, loss=None, model=None):
    """The digits with another loss of (number of the micro-batch, loss), or another model."""

    def counted(settings):
        loss_of, numbers = DIGITS.loss(settings), count(1)
        return lambda model, batch: loss(next(numbers), loss_of(model, batch))

    changes = {"loss": counted} if loss else {}
    if model:
        changes["model"] = lambda settings: model(DIGITS.model(settings))
    return replace(DIGITS, **changes)


# a checkpoint is blamed for what it cannot be loaded by, and for nothing else


def loading(error):
    """A model that no state can be loaded into."""

    class Loading(nn.Sequential):
        def load_state_dict(self, *_, **__):
            raise error

    return Loading


@pytest.mark.parametrize(
    "error",
    [RuntimeError(CLOSED), dist.DistNetworkError("lost"), RuntimeError(NO_MEMORY), MemoryError()],
)
def test_a_good_checkpoint_is_not_blamed_for_the_network_or_the_memory(tmp_path, error):
    saved = Training(DIGITS, SETTINGS).state_dict()
    with pytest.raises(type(error)) as raised:
        Training(digits(model=loading(error)), SETTINGS).load_state_dict(saved, tmp_path)
    assert raised.value is error


def without(state, *path):
    state = copy.deepcopy(state)
    holder = state
    for name in path[:-1]:
        holder = holder[name]
    del holder[path[-1]]
    return state


@pytest.mark.parametrize(
    "path", [("train",), ("model", "0.weight"), ("optimizer", "state"), ("train", "ranks")]
)
def test_a_checkpoint_that_lacks_something_is_refused(tmp_path, path):
    state = Training(DIGITS, SETTINGS).state_dict()
    with pytest.raises(RunError, match="does not fit its recipe"):
        Training(DIGITS, SETTINGS).load_state_dict(without(state, *path), tmp_path)


def test_a_good_checkpoint_is_not_blamed_for_a_rank_that_is_gone(tmp_path, monkeypatch):
    """The loop is loaded with the other ranks; here a call of torch's inside fails as gloo does."""

    def lose(*_):
        raise RuntimeError(CLOSED)

    training = Training(DIGITS, SETTINGS)
    saved = training.state_dict()
    monkeypatch.setattr(torch, "set_rng_state", lose)
    with pytest.raises(RuntimeError, match="Connection closed by peer") as raised:
        training.load_state_dict(saved, tmp_path)
    assert is_of_network(raised.value)
    assert not isinstance(raised.value, RunError)


# errors and what is noted on them


def test_that_ranks_were_waited_for_is_noted_once():
    error = RuntimeError(CLOSED)
    for _ in range(2):
        note_waiting(error, 0, 2)
    (note,) = error.__notes__
    assert "bigbatch: rank 0 of 2 waited here for the others" in note
    for other, ranks in ((RuntimeError(CLOSED), 1), (RuntimeError("shapes"), 2)):
        note_waiting(other, 0, ranks)
        assert not hasattr(other, "__notes__")


def exhausted(number, loss):
    raise RuntimeError(NO_MEMORY)


def test_no_memory_in_the_loss_ends_with_the_size_to_set(bigbatch, tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "digits", digits(loss=exhausted))
    command = [
        "train",
        "digits",
        "--policy",
        "fixed",
        "--batch-size",
        "64",
        "--micro-batch",
        "8",
        "--run-dir",
    ]
    with pytest.raises(RuntimeError) as raised:
        bigbatch(*command, tmp_path / "run")
    (note,) = raised.value.__notes__
    assert "this micro-batch had 8 samples; set micro_batch=4" in note


# what is left behind


class Killed(BaseException):
    """In the middle of a step."""


@pytest.mark.thorough
def test_a_run_with_a_skipped_step_that_continues_writes_every_step_once(tmp_path):
    """The third step is skipped; the run is saved after the fifth and killed in the ninth."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def loss(number, value):
        if number == 4 * 8 + 1:
            raise Killed
        return value * torch.nan if number == 4 * 2 + 1 else value

    run = RunDirectory.create(tmp_path / "run", SETTINGS.as_dict())
    view = LiveView(quiet=True)
    with pytest.raises(Killed), pytest.warns(UserWarning, match="not finite"):
        train_run(Training(digits(loss=loss), SETTINGS), run, view, "")
    assert [3] == [row["step"] for row in history_of(run.path).rows if row["skipped"]]
    assert 8 == len(history_of(run.path).rows)
    train_run(Training(DIGITS, SETTINGS), run, view, "")
    logged = EventAccumulator(str(run.path / "events")).Reload().Scalars("batch_size")
    assert list(range(1, len(history_of(run.path).rows) + 1)) == [event.step for event in logged]
