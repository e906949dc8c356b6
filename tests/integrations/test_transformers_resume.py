"""A Trainer that is interrupted continues with the same batches, rates and weights."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

import bigbatch as bb
from accelerate_process import launched
from bigbatch.errors import StateError
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.optim import VRAdam
from ranks import RankError
from tiny_trainer import arguments, gpt, logged, texts

FIGURES = ("loss", "grad_norm", "learning_rate", "batch_size", "samples", "epoch", "similarity")
POLICY = bb.SimiGrad(target=0.5, max_batch=32)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop |= state.global_step == self.step


def build(folder, reduced=False, callbacks=(), **settings):
    model = gpt(dropout=0.1)
    optimizer = VRAdam(model.parameters(), lr=1e-2) if reduced else None
    return AdaptiveTrainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=texts(70),  # no multiple of anything
        policy=POLICY,
        batch_size=8,
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
        every=1,
    )


def interrupted(folder, step, reduced=False, **settings):
    """The figures of a run that was stopped and begun again, and its weights."""
    settings = {"save_strategy": "steps", "save_steps": step} | settings
    first = build(folder, reduced, [StopAt(step)], **settings)
    first.train()
    second = build(folder, reduced, **settings | {"save_steps": 10**9})
    second.train(resume_from_checkpoint=True)
    return logged(second, *FIGURES), weights(second)


def uninterrupted(folder, reduced=False, **settings):
    trainer = build(folder, reduced, **settings)
    trainer.train()
    return logged(trainer, *FIGURES), weights(trainer)


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


STEPS = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    "step", [6, *(pytest.param(step, marks=pytest.mark.thorough) for step in (4, 7, 8))]
)
def test_a_run_continues_from_any_update(tmp_path, step):
    expected, whole = uninterrupted(tmp_path / "whole")
    actual, halves = interrupted(tmp_path / "halves", step)
    assert expected == actual
    assert all(map(torch.equal, whole, halves))


def test_an_update_that_was_tried_is_the_last_of_an_epoch(tmp_path):
    ends = [line[5] for line in uninterrupted(tmp_path)[0]]
    assert 1.0 in [ends[step - 1] for step in (4, 6, 7, 8)]
    assert 2.0 == ends[-1]


def test_a_run_continues_from_an_epochs_end(tmp_path):
    settings = {"save_strategy": "epoch", "num_train_epochs": 3}
    expected, whole = uninterrupted(tmp_path / "whole", **settings)
    step = [line[5] for line in expected].index(2.0)  # one before the epoch is over
    actual, halves = interrupted(tmp_path / "halves", step, **settings)
    assert expected == actual
    assert all(map(torch.equal, whole, halves))


def test_a_run_that_was_done_does_nothing_more(tmp_path):
    trainer = build(tmp_path, **STEPS)
    trainer.train()
    before, steps = weights(trainer), trainer.state.global_step
    again = build(tmp_path, **STEPS)
    again.train(resume_from_checkpoint=True)
    assert steps == again.state.global_step
    assert all(map(torch.equal, before, weights(again)))


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:max_steps")
def test_a_variance_reduced_run_continues(tmp_path, workers):
    settings = {"dataloader_num_workers": workers, "max_steps": 6}
    expected, whole = uninterrupted(tmp_path / "whole", reduced=True, **settings)
    actual, halves = interrupted(tmp_path / "halves", 4, reduced=True, **settings)
    assert expected == actual
    assert all(map(torch.equal, whole, halves))


def test_the_state_is_loaded_without_pickle(tmp_path):
    build(tmp_path, callbacks=[StopAt(2)], **STEPS).train()
    (file,) = (tmp_path / "checkpoint-2").glob("adaptive_batch_*.pt")
    assert {"epochs", "train"} == set(torch.load(file, weights_only=True))


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path):
    Trainer(
        model=gpt(), args=arguments(tmp_path, max_steps=2, **STEPS), train_dataset=texts()
    ).train()
    with pytest.raises(StateError, match="AdaptiveTrainer did not save it"):
        build(tmp_path).train(resume_from_checkpoint=True)


# on two processes


@pytest.mark.thorough
@pytest.mark.parametrize("reduced", [False, True], ids=["adamw", "vr-adam"])
def test_two_processes_continue(ranks, tmp_path, reduced):
    whole = ranks(2)(run, uninterrupted, str(tmp_path / "whole"), (reduced,))
    halves = ranks(2)(run, interrupted, str(tmp_path / "halves"), (4, reduced))
    for (expected, _), (actual, _) in zip(whole[:1], halves[:1], strict=True):
        assert expected == actual
        assert expected
    for (_, local), (_, yours) in zip(whole, halves, strict=True):
        assert all(map(torch.equal, local, yours))


def run(rank, ranks, function, folder, arguments):
    with launched(rank, ranks):
        return function(folder, *arguments)


def test_one_process_continues_where_two_were_stopped(ranks, tmp_path):
    ranks(2)(begin, str(tmp_path))
    trainer = build(tmp_path)
    with pytest.warns(UserWarning, match="another number of ranks"):
        trainer.train(resume_from_checkpoint=True)
    assert 140 == trainer.adaptive.samples
    assert 2.0 == trainer.state.epoch


def begin(rank, ranks, folder):
    with launched(rank, ranks):
        build(folder, callbacks=[StopAt(3)], **STEPS).train()


def test_a_missing_state_is_said_on_every_process(ranks, tmp_path):
    build(tmp_path, callbacks=[StopAt(2)], **STEPS).train()
    for file in (tmp_path / "checkpoint-2").glob("adaptive_batch_*.pt"):
        file.unlink()
    with pytest.raises(RankError, match="did not save it"):
        ranks(2)(go_on, str(tmp_path))


def go_on(rank, ranks, folder):
    with launched(rank, ranks):
        build(folder).train(resume_from_checkpoint=True)
