"""SimiGrad's rule to the letter, and what policies refuse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import Decision, Fixed, GradientNoise, Progress, SimiGrad
from bigbatch.errors import SettingError


def now(target, batch_size=None):
    return Progress(target=target, batch_size=batch_size or target, base_batch=128)


def step(similarity, samples=128):
    """A step whose phi is `similarity`."""
    return GradientNoise(similarity, (1 - similarity) * samples / 2, samples, micro_batches=8)


def test_the_rule_is_the_papers_in_whole_numbers():
    policy = SimiGrad(target=0.2)
    for B in range(1, 20_000):
        assert max(B + 1, (11 * B) // 10) == policy.next_batch(0.1, B)
        assert max(1, min(B - 1, (9 * B) // 10)) == policy.next_batch(0.3, B)


def test_the_readmes_example_grows_from_128_to_140():
    assert 140 == SimiGrad(target=0.2, min_batch=1, max_batch=None).next_batch(0.1, 128)
    assert 140 == SimiGrad(target=0.2).next_batch(similarity=0.1, batch_size=128)


@pytest.mark.parametrize("similarity", [0.2, math.nan, math.inf, -math.inf])
def test_at_the_target_or_without_a_number_the_batch_stays(similarity):
    policy = SimiGrad(target=0.2)
    assert 128 == policy.next_batch(similarity, 128)
    assert 1 == policy.next_batch(similarity, 1)


@pytest.mark.parametrize("similarity", [-1.0, 0.2, 1.0, math.nan])
def test_bounds_hold_even_where_the_batch_would_stay(similarity):
    policy = SimiGrad(target=0.2, min_batch=100, max_batch=200)
    assert 100 == policy.next_batch(similarity, 10)
    assert 200 == policy.next_batch(similarity, 1000)


@given(
    target=st.floats(-0.99, 0.99),
    phi=st.floats(-1, 1) | st.just(math.nan),
    batch_size=st.integers(1, 10**6),
    low=st.integers(1, 10**5),
    width=st.integers(0, 10**5),
)
def test_a_decision_is_inside_the_bounds_and_moves_the_right_way(
    target, phi, batch_size, low, width
):
    bounded = SimiGrad(target, min_batch=low, max_batch=low + width)
    assert low <= bounded.next_batch(phi, batch_size) <= low + width
    free = SimiGrad(target).next_batch(phi, batch_size)
    assert (phi < target) == (free > batch_size)
    assert (phi > target and batch_size > 1) == (free < batch_size)


def test_grow_and_shrink_replace_the_papers_factors():
    policy = SimiGrad(target=0.2, grow=2.0, shrink=0.5)
    assert (20, 5) == (policy.next_batch(0.1, 10), policy.next_batch(0.3, 10))
    slow = SimiGrad(target=0.2, grow=1.001, shrink=0.999)
    assert (11, 9) == (slow.next_batch(0.1, 10), slow.next_batch(0.3, 10))  # at least by one


def test_decide_applies_the_rule_to_what_was_decided_not_to_what_was_cut():
    assert 140 == SimiGrad(target=0.2).decide(step(0.1), now(128, batch_size=96)).batch_size
    assert 115 == SimiGrad(target=0.2).decide(step(0.3), now(128, batch_size=512)).batch_size


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (step(0.1), "similarity 0.100 < 0.2"),
        (step(0.5), "similarity 0.500 > 0.2"),
        (GradientNoise(1.0, 256.0, 128, 8), "similarity 0.200 = 0.2"),
        (GradientNoise(0.0, 0.0, 128, 8), "not finite"),
    ],
)
def test_the_reason_says_what_was_compared(noise, words):
    assert words in SimiGrad(target=0.2).decide(noise, now(128)).reason


@pytest.mark.parametrize("start", [1, 32, 20_000])
@pytest.mark.parametrize("target", [0.1, 1 / 3, 0.8])
def test_the_batch_settles_at_its_fixed_point(start, target):
    noise_scale = 1000.0
    policy, B, seen = SimiGrad(target=target), start, []
    fixed_point = noise_scale * 2 * target / (1 - target)
    for _ in range(250):
        noise = GradientNoise(1.0, noise_scale, samples=B, micro_batches=8)
        assert pytest.approx(1 / (1 + 2 * noise_scale / B)) == noise.similarity
        B = policy.decide(noise, now(B)).batch_size
        seen.append(B)
    late = seen[-50:]
    # one step of 10 % to either side, and the whole numbers
    assert 0.9 * fixed_point - 1 <= min(late) <= fixed_point <= max(late) <= 1.1 * fixed_point + 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"target": 1.0}, r"target=1.0 must lie inside \(-1, 1\)"),
        ({"target": -1.0}, "target=-1.0"),
        ({"target": math.nan}, "target=nan"),
        ({"min_batch": 0}, "min_batch=0"),
        ({"min_batch": 1.5}, "min_batch=1.5"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_batch": math.inf}, "max_batch=inf"),
        ({"min_batch": 512, "max_batch": 256}, "min_batch=512 exceeds max_batch=256"),
        ({"grow": 1.0}, "grow=1.0"),
        ({"grow": math.inf}, "grow=inf"),
        ({"grow": math.nan}, "grow=nan"),
        ({"shrink": 0.0}, "shrink=0.0"),
        ({"shrink": 1.0}, "shrink=1.0"),
        ({"shrink": math.nan}, "shrink=nan"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong, words):
    with pytest.raises(SettingError, match=words):
        SimiGrad(**wrong)


def test_fixed_keeps_its_batch_whatever_is_measured():
    for similarity in (-1.0, 0.2, 1.0):
        assert 96 == Fixed(96).decide(step(similarity), now(128)).batch_size
    with pytest.raises(SettingError, match="batch_size=0"):
        Fixed(0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 128.0}, "batch_size=128.0"),
        ({"batch_size": 128, "lr_factor": -0.1}, "lr_factor=-0.1"),
        ({"batch_size": 128, "lr_factor": math.nan}, "lr_factor=nan"),
        ({"batch_size": 128, "lr_factor": math.inf}, "lr_factor=inf"),
    ],
)
def test_a_decision_that_nobody_can_carry_out_is_refused(wrong, words):
    with pytest.raises(SettingError, match=words):
        Decision(reason="test", **wrong)
