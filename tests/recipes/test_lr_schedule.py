"""Learning-rate schedules in words, against torch's own and closed forms."""

import math

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from bigbatch.errors import SettingError
from bigbatch_recipes.lr_schedule import LRSchedule

EPOCHS, SAMPLES = 10, 1000


def factors(text, *places):
    factor = LRSchedule(text).lr_lambda(EPOCHS, SAMPLES)
    return [factor(place) for place in places]


def of_torch(make):
    """The rates that a torch scheduler gives, epoch by epoch."""
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(EPOCHS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("cosine", lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS)),
        ("x0.1 at 3 and 7 epochs", lambda optimizer: MultiStepLR(optimizer, [3, 7], 0.1)),
    ],
)
def test_it_is_torchs_own_at_each_epochs_end(text, make):
    places = [epoch * SAMPLES for epoch in range(EPOCHS + 1)]
    assert pytest.approx(of_torch(make)) == factors(text, *places)


def test_a_polynomial_ends_at_0_or_after_its_amount():
    assert [1.0, 0.25, 0.0] == factors("polynomial 2", 0, 5000, 10_000)
    assert [1.0, 0.5, 0.0] == factors("polynomial 1 over 4K samples", 0, 2000, 9000)
    assert [0.75] == factors("polynomial 1 over 8 epochs", 2000)


def test_a_warm_up_rises_from_0_and_the_shape_begins_at_its_end():
    assert [0.0, 0.5, 1.0] == factors("warm-up 2 epochs; constant", 0, 1000, 2000)
    assert [0.25] == factors("warm-up 2 epochs power 2; constant", 1000)
    assert pytest.approx([1.0, 0.5, 0.0]) == factors("warm-up 2 epochs; cosine", 2000, 6000, 10_000)


def test_steps_are_counted_from_the_trainings_start_whatever_the_warm_up():
    text = "warm-up 2 epochs; x0.1 at 3 epochs"
    assert [1.0, 1.0, 0.1] == factors(text, 2000, 2999, 3000)


def test_a_decay_every_amount_is_continuous():
    found = factors("warm-up 500 samples power 2; x0.9 every 250 samples", 250, 500, 625, 750)
    assert pytest.approx([0.25, 1.0, math.sqrt(0.9), 0.9]) == found


def test_constant_is_1():
    assert [1.0, 1.0] == factors("constant", 0, 20_000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cosin",
        "warm-up 2 epochs",
        "cosine; warm-up 2 epochs",
        "warm-up 1 epoch; warm-up 1 epoch; cosine",
        "x0.1 at 3, 7 epochs",
        "polynomial",
        "warm-up 5; cosine",
        "warm-up 500 steps; cosine",  # of which batch?
        "x0.9 every 5 steps",
        "polynomial 1 over 4M tokens",
    ],
)
def test_what_is_none_says_how_to_write_one(text):
    with pytest.raises(SettingError, match=r"is not understood; write one of: constant, cosine"):
        LRSchedule(text)


@pytest.mark.parametrize("text", ["warm-up 0 epochs; cosine", "x0.9 every 0.5 samples"])
def test_an_amount_that_is_none_is_refused_at_once(text):
    with pytest.raises(SettingError, match="must be a whole number of at least 1"):
        LRSchedule(text)


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("cosine", 0),
        ("warm-up 2 epochs; polynomial 1", 2_000),
        ("warm-up 1 epoch; polynomial 1 over 4K samples", 5_000),
        ("warm-up 5 epochs; x0.1 at 9 and 13 epochs", 13_000),
        ("warm-up 300 samples; x0.9 every 20K samples", 300),
    ],
)
def test_it_knows_how_long_a_training_must_be(text, samples):
    assert samples == LRSchedule(text).required_samples(SAMPLES)
