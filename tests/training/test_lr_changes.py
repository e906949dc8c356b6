"""A schedule left in the loop, of which the loop does not know: one warning shows `scheduler=`."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

import bigbatch as bb
from bigbatch.optim import VRSGD

torch.set_num_threads(1)


def loop(kind=SGD, *, rate=0.1, scheduler=None, updates=4, **settings):
    torch.manual_seed(5)
    model = nn.Linear(4, 1)
    batches = [torch.randn(16, 4) for _ in range(updates)]
    opt = kind(model.parameters(), lr=rate)
    built_scheduler = None if scheduler is None else scheduler(opt)
    return bb.AdaptiveBatch(
        model,
        opt,
        batches,
        policy=bb.Fixed(16),
        micro_batch=2,
        scheduler=built_scheduler,
        **settings,
        every=1,
    )


def one_pass(train, between=lambda number: None):
    """What was said of rates in a pass, with something done after each update."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        for number, step in enumerate(train):
            for x in step:
                step.backward(train.model(x).square().mean())
            step.update()
            between(number)
    caught = [each for each in caught if "learning rate of" in str(each.message)]
    assert all(each.filename == __file__ for each in caught)  # the line of the loop
    return [str(each.message) for each in caught]


SCHEDULES = {
    "cosine": lambda o: CosineAnnealingLR(o, 282),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=282),
    "steps": lambda o: StepLR(o, 2),
    "lambda": lambda o: LambdaLR(o, lambda update: 1 / (1 + update)),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [SGD, VRSGD])
@pytest.mark.parametrize("lr_scaling", [None, "sqrt"])
def test_a_schedule_that_is_left_in_the_loop_is_said_once(name, kind, lr_scaling):
    train = loop(kind, lr_scaling=lr_scaling, base_batch=4)
    scheduler = SCHEDULES[name](train.optimizer)
    message = one_pass(train, lambda _: scheduler.step())
    message += one_pass(train, lambda _: scheduler.step())
    assert 1 == len(message)
    assert "AdaptiveBatch(scheduler=scheduler)" in message[0]
    assert "leave scheduler.step() out" in message[0]


def test_both_rates_are_in_the_warning_and_by_hand_nothing_else_happens():
    train = loop()

    def by_hand(number):
        if number == 1:
            train.optimizer.param_groups[0]["lr"] *= 0.5

    (message,) = one_pass(train, by_hand)
    assert "from 0.1 to 0.05" in message
    assert "A single change by hand stays as you make it" in message
    assert (0.05,) == train.record.lr


def test_a_rate_in_a_tensor_is_watched_without_reading_it():
    train = loop(Adam, rate=torch.tensor(0.1), base_batch=4)
    scheduler = CosineAnnealingLR(train.optimizer, 282)
    assert [] == one_pass(train)
    (message,) = one_pass(train, lambda _: scheduler.step())
    assert "was changed between two updates" in message


# what is none of its affairs


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("lr_scaling", [None, "sqrt", "linear"])
def test_rates_that_follow_the_batch_are_not_said(rate, lr_scaling):
    train = loop(Adam, rate=rate, lr_scaling=lr_scaling, base_batch=4)
    assert [] == one_pass(train) + one_pass(train)


def test_a_scheduler_that_the_loop_was_given_is_not_said():
    train = loop(scheduler=SCHEDULES["cosine"])
    assert [] == one_pass(train) + one_pass(train)
    train.scheduler = None
    assert [] == one_pass(train)
    train.scheduler = SCHEDULES["steps"](train.optimizer)
    assert [] == one_pass(train)
    train.scheduler = lambda tick: 0.5 - 0.01 * tick
    assert [] == one_pass(train)


def test_a_rate_by_hand_over_that_of_a_scheduler_is_said_once():
    """As in nanoGPT's loop with `scheduler=get_lr` where the lines that set the rate are left."""

    def by_hand(number):
        train.optimizer.param_groups[0]["lr"] = rate(number + 1)

    def rate(number):
        return 0.5 / (1 + number)

    train = loop(scheduler=lambda _: rate)
    assert [] == one_pass(train, by_hand)  # a fixed batch is the base batch: both are the same
    train = loop(scheduler=lambda _: rate, base_batch=4, lr_scaling=None)
    (message,) = one_pass(train, by_hand)
    assert "from 0.1 to 0.25 between two updates" in message
    assert "leave out the lines that set it from a count of updates" in message


@pytest.mark.parametrize(
    "kind", [lambda o: StepLR(o, 1), lambda o: ReduceLROnPlateau(o, patience=0)]
)
def test_a_schedule_of_epochs_is_the_users_own(kind):
    train = loop()
    scheduler, before = kind(train.optimizer), train.optimizer.param_groups[0]["lr"]
    for epoch in train.epochs(4):
        assert [] == one_pass(train)
        scheduler.step(*([1.0 + epoch] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert before > train.optimizer.param_groups[0]["lr"]


def test_a_state_that_is_loaded_within_a_pass_is_not_said():
    train, other = loop(), loop(rate=0.3)
    saved = other.optimizer.state_dict()
    assert [] == one_pass(train, lambda _: train.optimizer.load_state_dict(saved))
    assert (0.3,) == train.record.lr


def test_a_group_that_is_added_within_a_pass_is_not_said():
    train = loop()
    extra = nn.Parameter(torch.zeros(1))

    def add(number):
        if number == 1:
            train.optimizer.add_param_group({"params": [extra], "lr": 0.5})

    assert [] == one_pass(train, add)
