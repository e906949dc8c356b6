"""Trainings of recipes on real ranks: what rank 0 does for all, and the curve of a whole one."""

import warnings

import pytest
import torch

from bigbatch.errors import RunError
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.process_group import is_rank_zero, run_on_rank_zero
from bigbatch_recipes.train_run import Training
from distributed_states import states_of

EXACT = DIGITS.settings().with_changes({"double": True, "virtual_ranks": 4})  # on 1, 2, 4 ranks


def refuse():
    raise RunError("the disk is full")


def take_part(rank, ranks):
    try:
        run_on_rank_zero(refuse)
    except RunError as error:
        said = str(error)
    return run_on_rank_zero(lambda: f"by {rank}"), said, is_rank_zero()


def test_what_rank_0_makes_or_fails_to_make_is_everybodys(ranks):
    first, second = ranks(2)(take_part)
    assert ("by 0", "the disk is full", True) == first
    assert ("by 0", "the disk is full", False) == second


def start(rank, ranks, settings):
    training = Training(DIGITS, settings)
    weights = [p.tolist() for p in training.model[0].parameters()]
    own = [state["own"]["rank"] for state in states_of(training.state_dict()["train"])]
    return weights, torch.initial_seed(), own, training.train.batches.virtual_ranks


def test_ranks_begin_with_the_same_weights_and_draw_other_numbers(ranks):
    (weights, seed, own, virtual), (others, another, others_own, _) = ranks(2)(start, EXACT)
    assert weights == others
    assert seed != another
    assert [0, 1] == own == others_own
    assert 4 == virtual


def notes_of_two(rank, ranks, settings):
    """What two trainings of one process warn of."""
    with warnings.catch_warnings(record=True, action="always") as noted:
        for _ in range(2):
            Training(DIGITS, settings)
    return [str(note.message) for note in noted if "virtual_ranks" in str(note.message)]


def test_other_groups_of_samples_are_noted_once_a_process(ranks):
    settings = EXACT.with_changes({"min_batch": 64, "batch_size": 64})
    for (note,) in ranks(3)(notes_of_two, settings):
        assert "virtual_ranks=4 is no multiple of the 3 ranks, so 12 are used" in note


def curve(rank, ranks, settings):
    """A whole training on this rank: the batch and the loss of each step, and what was measured."""
    training, rows = Training(DIGITS, settings), []
    for _ in training.train.epochs(settings.epochs):
        for step in training.train:
            for batch in step:
                step.backward(training.loss_of(training.wrapped_model, batch))
            record = step.update()
            noise = record.statistics
            measured = (noise.grad_sqnorm, noise.grad_variance) if noise else ()
            rows.append((record.batch_size, record.loss, *measured))
    return rows, training.scores()


@pytest.mark.release
@pytest.mark.parametrize("arm", ["noise-scale", "simigrad-vr"])
def test_the_curve_of_25_epochs_is_that_of_one_process(ranks, arm):
    """float64 sums in another order: 2e-14 seen; in float32 the batch sizes of an arm part."""
    settings = EXACT.with_changes(DIGITS.arms[arm])
    rows, accuracy = curve(0, 1, settings)
    assert (len(rows) + 1) // 2 == sum(len(row) == 4 for row in rows)  # every=2
    for others, test in ranks(2)(curve, settings):
        assert accuracy == test
        assert len(rows) == len(others)
        for one, other in zip(rows, others, strict=True):
            assert pytest.approx(one, rel=1e-9, abs=1e-12) == other
