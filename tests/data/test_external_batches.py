"""A loop of somebody else's: micro-batches are announced, backwards and steps are its own."""

import itertools

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.errors import GradientError, LoopError
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.optim import VRSGD
from bigbatch.training.loss_weights import weighted_loss

pytestmark = pytest.mark.filterwarnings("ignore:k = . micro-batches give a poor")

SEED = 2
MICRO = 4
DATA = torch.randn(200, 3, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)


class Scripted:
    """A policy that follows a list, then stays."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def decide(self, noise, now):
        batch_size = self.sizes[now.steps] if now.steps < len(self.sizes) else now.target_batch_size
        return bb.Decision(batch_size, "scripted")


def network():
    torch.manual_seed(SEED)
    return nn.Linear(3, 1).double()


def loss_of(model, rows):
    return model(rows).square().mean()


def external_loop(policy, optimizer=torch.optim.SGD, samples=None, scaler=None, **settings):
    model = network()
    settings = {"min_micro_batches": 2, "lr_scaling": None, "batch_size": 8, **settings}
    train = bb.AdaptiveBatch(
        model,
        optimizer(model.parameters(), lr=0.1),
        ExternalBatches(MICRO, samples),
        fixed_micro_batch=True,
        policy=policy,
        scaler=scaler,
        **settings,
        every=1,
    )
    return ExternalLoop(train)


def run(loop, data=DATA, clip=None, knows_length=True):
    """One epoch as an engine would; returns the backwards of each of its steps."""
    train, batches, done = loop.train, data.split(MICRO), [0]
    for number, rows in enumerate(batches, 1):
        left = len(batches) - number
        loop.announce(len(rows), ends_epoch=not left, remaining=left if knows_length else None)
        loss = loss_of(train.model, rows)
        with loop.step.weighted_backward(loss) as factor:
            weighted_loss(loss, factor).backward()
        done[-1] += 1
        if loop.step.complete:
            with loop.step.optimizer_step() as finite:
                if finite:
                    train.optimizer.step()
            done.append(0)
    loop.end_pass()
    return done[:-1]


def test_a_driven_loop_goes_the_way_of_our_own():
    policy = Scripted(8, 8, 16, 12, 24, 20)  # whole steps of 88 samples
    loop = external_loop(policy)

    done = run(loop, DATA[:88])

    model = network()
    train = bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DATA[:88].split(MICRO),
        policy=policy,
        batch_size=8,
        micro_batch=MICRO,
        fixed_micro_batch=True,
        min_micro_batches=2,
        lr_scaling=None,
        every=1,
    )
    for step in train:
        for rows in step:
            step.backward(loss_of(model, rows))
        record = step.update()
    assert [2, 2, 4, 3, 6, 5] == done
    assert (train.epoch, train.samples, train.steps) == (1, 88, 6)
    assert (1, 88, 6) == (loop.train.epoch, loop.train.samples, loop.train.steps)
    assert record.statistics == loop.train.record.statistics
    assert torch.equal(model.weight, loop.train.model.weight)


def test_an_epoch_may_end_in_a_step_of_one_micro_batch():
    loop = external_loop(bb.Fixed(8))

    assert [2, 2, 1] == run(loop, DATA[:19])
    assert [2, 2, 1] == run(loop, DATA[:19])

    assert (2, 38) == (loop.train.epoch, loop.train.samples)
    assert "the end of an epoch does not decide" == loop.train.record.decision.reason


def test_a_pass_is_counted_as_soon_as_it_has_ended():
    loop = external_loop(bb.Fixed(8))
    run(loop, DATA[:16])

    state = loop.train.state_dict()
    again = external_loop(bb.Fixed(8))
    again.train.load_state_dict(state)
    run(again, DATA[:16])

    assert (2, 32) == (again.train.epoch, again.train.samples)
    assert 1 == again.train.record.epoch


@pytest.mark.parametrize("batches", range(2, 14))
@pytest.mark.parametrize("k", [2, 3, 5])
def test_a_variance_reduced_optimizer_is_left_two_micro_batches_or_none(k, batches):
    loop = external_loop(bb.Fixed(k * MICRO), VRSGD, batch_size=k * MICRO, samples=None)

    done = run(loop, DATA[: batches * MICRO])

    assert batches == sum(done)
    assert min(done) >= 2
    assert max(done) <= k + 1
    assert [k] * (batches // k - 1) == done[: batches // k - 1]  # only the last two share


def test_without_a_known_length_what_is_left_over_is_refused():
    loop = external_loop(bb.Fixed(8), VRSGD)
    with pytest.raises(GradientError, match=r"saw 1 backward.* at least 2"):
        run(loop, DATA[:12], knows_length=False)


def test_a_step_that_was_lengthened_does_not_decide():
    loop = external_loop(Scripted(8, 12, 12), VRSGD)

    assert [3] == run(loop, DATA[:12])

    assert "the end of an epoch does not decide" == loop.train.record.decision.reason


def test_a_step_says_which_micro_batch_is_its_last():
    loop, flags = external_loop(bb.Fixed(12), batch_size=12), []
    for rows in DATA[:24].split(MICRO):
        loop.announce(len(rows))
        flags.append((loop.step.last, loop.step.waiting))
        with loop.step.weighted_backward(loss := loss_of(loop.train.model, rows)) as factor:
            weighted_loss(loss, factor).backward()
        flags[-1] += (loop.step.waiting,)
        if loop.step.complete:
            with loop.step.optimizer_step():
                loop.train.optimizer.step()

    assert [(last, True, False) for last in (False, False, True) * 2] == flags


def test_a_micro_batch_before_the_optimizers_step_is_refused():
    loop = external_loop(bb.Fixed(8))
    for rows in DATA[:8].split(MICRO):
        loop.announce(len(rows))
        with loop.step.weighted_backward(loss := loss_of(loop.train.model, rows)) as factor:
            weighted_loss(loss, factor).backward()

    with pytest.raises(LoopError, match="came before the optimizer had stepped"):
        loop.announce(MICRO)


def test_a_state_from_within_a_step_is_that_of_its_start():
    loop = external_loop(bb.Fixed(8))
    first, second, third = DATA[:12].split(MICRO)
    for rows in (first, second):
        loop.announce(len(rows))
        with loop.step.weighted_backward(loss := loss_of(loop.train.model, rows)) as factor:
            weighted_loss(loss, factor).backward()
    with loop.step.optimizer_step():
        loop.train.optimizer.step()
    before = loop.train.state_dict()

    loop.announce(len(third))
    within = loop.train.state_dict()

    assert before["shared"] == within["shared"]
    again = external_loop(bb.Fixed(8))
    again.train.load_state_dict(within)
    run(again, DATA[8:16])
    assert (2, 16) == (again.train.steps, again.train.samples)


def test_a_micro_batch_that_finds_no_memory_is_to_be_made_smaller_in_the_loader():
    loop = external_loop(bb.Fixed(8))
    loop.announce(MICRO)
    loss = loss_of(loop.train.model, DATA[:MICRO])

    with pytest.raises(MemoryError) as raised, loop.step.weighted_backward(loss):
        raise MemoryError

    (note,) = raised.value.__notes__
    assert "had 4 samples" in note
    assert "a trainer's loader needs batch_size=2" in note


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_were_unscaled_already_are_clipped_as_they_are(unscaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loop = external_loop(bb.Fixed(8), scaler=scaler)
    model, optimizer = loop.train.model, loop.train.optimizer
    for rows in DATA[:8].split(MICRO):
        loop.announce(len(rows))
        with loop.step.weighted_backward(loss := loss_of(model, rows)) as factor:
            scaler.scale(weighted_loss(loss, factor)).backward()
    if unscaled:
        scaler.unscale_(optimizer)

    norm = loop.step.clip_grad_norm_(1e-3)

    expected = torch.autograd.grad(loss_of(model, DATA[:8]), list(model.parameters()))
    length = torch.stack([g.norm() for g in expected]).norm()
    torch.testing.assert_close(length, norm)
    clipped = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped.item(), 1e-3)


def backwards(model):
    for rows in DATA[:8].split(MICRO):
        (loss_of(model, rows) / 2).backward()


@pytest.mark.parametrize("closure_empties", [False, True])
def test_a_closure_that_empties_the_gradients_leaves_nothing_to_step(closure_empties):
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def closure():
        backwards(model)
        if closure_empties:
            model.zero_grad()
        return 7.0

    assert 7.0 == optimizer.step(closure)

    assert closure_empties == torch.equal(before, model.weight)
    optimizer.zero_grad()
    optimizer.step(lambda: backwards(model))  # as if nothing had been
    assert not torch.equal(before, model.weight)


def test_states_are_consolidated_by_trainers_of_any_number_of_ranks():
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1, beta3=0.9)
    backwards(model)
    optimizer.step()

    optimizer.consolidate_state_dict()

    assert {0, 1} == set(itertools.chain(optimizer.state_dict()["state"]))
