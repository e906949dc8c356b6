"""Backwards of one step that are no micro-batches have longer gradients at some position."""

import random

import pytest

from bigbatch.advisor.position_test import differs_by_position
from made_observations import measured


def steps_of(rows):
    return [
        measured(i, 1.0, 10.0, features=tuple((value,) for value in row))
        for i, row in enumerate(rows)
    ]


def lengths(draw, k, steps, factors=()):
    """Lengths whose scale moves from step to step, each times the factor of its position."""
    factors = factors or [1.0] * k
    scales = [draw.lognormvariate(0, 3) for _ in range(steps)]
    return [[scale * f * draw.expovariate(1.0) for f in factors] for scale in scales]


@pytest.mark.parametrize("k", [2, 3, 8])
def test_exchangeable_backwards_raise_no_alarm(k):
    """300 trainings of 8 to 100 steps: at a level of 1e-5 one in 300 has an alarm."""
    draw = random.Random(k)
    said = {
        differs_by_position(steps_of(lengths(draw, k, draw.randint(8, 100)))) for _ in range(300)
    }
    assert {""} == said


@pytest.mark.parametrize("position", [1, 2])
def test_one_of_two_backwards_that_is_always_longer_is_found(position):
    rows = [(1.0, 2.0) if position == 2 else (2.0, 1.0) for _ in range(24)]
    said = differs_by_position(steps_of(rows))
    assert f"backward {position} of the 2 in a step has longer gradients" in said


@pytest.mark.parametrize(("k", "steps"), [(2, 200), (8, 100)])
def test_a_backward_that_is_mostly_longer_is_found(k, steps):
    rows = lengths(random.Random(0), k, steps, factors=[1.0] * (k - 1) + [4.0])
    assert f"backward {k} of the {k} in a step" in differs_by_position(steps_of(rows))


def test_eight_steps_are_enough_for_eight_backwards_in_order():
    assert "backward 8 of the 8" in differs_by_position(steps_of([range(1, 9)] * 8))


@pytest.mark.parametrize("k", [2, 8])
def test_seven_steps_are_too_few(k):
    assert "" == differs_by_position(steps_of([range(1, k + 1)] * 7))


@pytest.mark.parametrize("rows", [[], [()] * 40, [(1.0,)] * 40, [(1.0, 1.0)] * 40])
def test_one_backward_a_step_or_equal_ones_raise_no_alarm(rows):
    assert "" == differs_by_position(steps_of(rows))


def test_steps_of_another_number_of_backwards_are_left_out():
    assert "" == differs_by_position(steps_of([(1.0, 2.0, 3.0)] + [(1.0, 2.0)] * 40))
