"""Every policy: its rule in closed form, what it refuses, and a contract that all keep."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import (
    Controller,
    Decision,
    Fixed,
    GradientStatistics,
    LateSwitch,
    Needs,
    NoiseScale,
    Schedule,
    Seesaw,
    Shadow,
    SimiGrad,
    TrainingState,
)
from bigbatch.errors import SettingError


def now(target, batch_size=None):
    return TrainingState(target_batch_size=target, batch_size=batch_size or target)


def step(similarity, samples=128):
    """A step whose phi is `similarity`."""
    return GradientStatistics(similarity, (1 - similarity) * samples / 2, samples, micro_batches=8)


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
        (GradientStatistics(1.0, 256.0, 128, 8), "similarity 0.200 = 0.2"),
        (GradientStatistics(0.0, 0.0, 128, 8), "not finite"),
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
        noise = GradientStatistics(1.0, noise_scale, samples=B, micro_batches=8)
        assert pytest.approx(1 / (1 + 2 * noise_scale / B)) == noise.similarity
        B = policy.decide(noise, now(B)).batch_size
        seen.append(B)
    late = seen[-50:]
    # one step of 10 % to either side, and the whole numbers
    assert 0.9 * fixed_point - 1 <= min(late) <= fixed_point <= max(late) <= 1.1 * fixed_point + 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"target": 1.0}, r"target=1.0 must be a number in \(-1, 1\)"),
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


def test_a_decision_may_stop_the_weights():
    assert 0 == Decision(128, "frozen for a step", lr_factor=0).lr_factor


# NoiseScale

LOUD, CLEAR = GradientStatistics(-1.0, 576.0, 128, 8), GradientStatistics(4.0, 0.0, 128, 8)
NOTHING = GradientStatistics(0.0, 0.0, 128, 8)
UNKNOWN = GradientStatistics(math.nan, math.nan, 128, 8)


@pytest.mark.parametrize(
    ("multiple", "expected"), [(1.0, 576), (0.5, 288), (1 / 3, 192), (0.3, 173), (0.001, 1)]
)
def test_the_noise_scale_is_reached_in_one_step_from_anywhere(multiple, expected):
    noise = GradientStatistics(2.0, 1152.0, samples=64, micro_batches=8)
    for present in (1, 576, 10**6):
        assert expected == NoiseScale(multiple).decide(noise, now(present)).batch_size


@pytest.mark.parametrize("target", [0.1, 0.2, 1 / 3, 0.5, 0.9])
def test_a_similarity_target_is_a_multiple_of_the_noise_scale(target):
    multiple = 2 * target / (1 - target)
    noise = GradientStatistics(1.0, 100_000.0, samples=512, micro_batches=8)
    wanted = NoiseScale(multiple).decide(noise, now(512)).batch_size
    at_rest = GradientStatistics(1.0, 100_000.0, samples=wanted, micro_batches=8)
    assert pytest.approx(target, abs=1e-4) == at_rest.similarity  # half a sample in 20,000


def test_an_infinite_noise_scale_is_the_upper_bound_or_no_change():
    assert 128 == NoiseScale().decide(LOUD, now(128)).batch_size
    assert 4096 == NoiseScale(max_batch=4096).decide(LOUD, now(128)).batch_size
    huge = GradientStatistics(1e-300, 1e300, 128, 8)
    assert 4096 == NoiseScale(1e300, max_batch=4096).decide(huge, now(128)).batch_size


@pytest.mark.parametrize("noise", [NOTHING, UNKNOWN])
def test_a_step_without_a_number_changes_nothing(noise):
    assert 128 == NoiseScale(max_batch=4096).decide(noise, now(128)).batch_size


def test_no_noise_at_all_is_the_lower_bound():
    assert 1 == NoiseScale().decide(CLEAR, now(128)).batch_size
    assert 32 == NoiseScale(min_batch=32).decide(CLEAR, now(128)).batch_size


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: NoiseScale(0.0), "multiple=0.0"),
        (lambda: NoiseScale(math.inf), "multiple=inf"),
        (lambda: NoiseScale(math.nan), "multiple=nan"),
        (lambda: NoiseScale(min_batch=0), "min_batch=0"),
        (lambda: NoiseScale(max_batch=0), "max_batch=0"),
        (lambda: NoiseScale(1.0, 512, 256), "min_batch=512 exceeds max_batch=256"),
        (lambda: Shadow(None), "policy=None"),
        (lambda: Decision(8, "test", advice=0), "advice=0"),
    ],
)
def test_settings_of_the_other_policies_are_refused_by_name_too(wrong, words):
    with pytest.raises(SettingError, match=words):
        wrong()


# Shadow


def test_advice_is_reported_and_not_followed():
    decision = Shadow(SimiGrad(target=0.2)).decide(step(0.1), now(128))
    assert (128, 1.0, 140) == (decision.batch_size, decision.lr_factor, decision.advice)
    assert "140" in decision.reason
    assert "similarity 0.100 < 0.2" in decision.reason
    assert SimiGrad(target=0.2).decide(step(0.1), now(128)).advice is None
    decays = Schedule("64, x4 at 1 epoch up to 128, then decay")
    late = TrainingState(64, 64, epoch=1)
    assert 0.5 == decays.decide(LOUD, late).lr_factor
    assert 1.0 == Shadow(decays).decide(LOUD, late).lr_factor


def test_advice_keeps_the_bounds_of_the_policy_that_gives_it():
    bounded = NoiseScale(min_batch=64, max_batch=256)
    assert bounded.needs == Shadow(bounded).needs
    assert Needs(statistics=False) == Shadow(Fixed(96)).needs


def test_advice_keeps_the_controllers_bounds_too():
    bounds = {"min_batch": 32, "max_batch": 512}
    for policy, expected in [(Fixed(4096), 512), (Fixed(8), 32), (Fixed(96), 96)]:
        decision = Controller(Shadow(policy), 64, **bounds).next(step(0.1))
        assert (64, expected) == (decision.batch_size, decision.advice)
        assert f"advice: {expected} " in decision.reason


# the contract of every policy

BOUNDS = {"min_batch": 20, "max_batch": 3000}
EVERY_POLICY = [
    Fixed(96),
    SimiGrad(0.3, **BOUNDS),
    SimiGrad(-0.5),
    NoiseScale(2.0, **BOUNDS),
    NoiseScale(),
    Schedule("64, x3 every 1K samples up to 2000, then decay"),
    Schedule("900 to 30 over 5 epochs in steps of 30, 40 from 9 epochs, x1.1 at 70 steps"),
    Shadow(SimiGrad(0.3, **BOUNDS)),
    Shadow(Schedule("64, x3 every 1K samples")),
    Seesaw(max_batch=500),
    Seesaw(cap=NoiseScale(4.0), max_batch=900),
    LateSwitch(0.5, SimiGrad(0.3, max_batch=900)),
    LateSwitch(0.9, Seesaw(cap=NoiseScale())),
]
noises = st.builds(
    GradientStatistics,
    grad_sqnorm=st.floats(-1e6, 1e6) | st.just(math.nan),
    grad_variance=st.floats(0, 1e9) | st.sampled_from([math.nan, 1e-300]),
    samples=st.integers(1, 10**6),
    micro_batches=st.just(8),
)
moments = st.builds(
    TrainingState,
    target_batch_size=st.integers(20, 3000),
    batch_size=st.integers(1, 10**6),
    samples=st.integers(0, 10**12),
    steps=st.integers(0, 10**9),
    epoch=st.integers(0, 10**4),
    first_batch_size=st.integers(1, 400),
    lr_decay=st.floats(0, 1),
)


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
@given(noise=noises, moment=moments)
def test_every_policy_keeps_the_contract(policy, noise, moment):
    decision = policy.decide(noise, moment)
    assert isinstance(decision.batch_size, int)
    assert decision.reason.strip()
    low, high = policy.needs.min_batch or 1, policy.needs.max_batch
    assert low <= decision.batch_size <= (high or math.inf)
    # pure: asked again, and asked of a copy
    assert decision == policy.decide(noise, moment)
    assert decision == pickle.loads(pickle.dumps(policy)).decide(noise, moment)


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
def test_every_policy_is_written_as_it_is_made(policy):
    assert policy == eval(repr(policy))
    assert hash(policy) == hash(eval(repr(policy)))
