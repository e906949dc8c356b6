"""Policies that follow the scheduled learning rate: Seesaw, and a late switch."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import (
    Controller,
    Fixed,
    Goodput,
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
from bigbatch.policies.parse import parse_policy
from property_tests import property_test
from stateful_policy import Patient

NOISE = GradientStatistics(1.0, 300.0, samples=64, micro_batches=4)


def at(decay, **more):
    return TrainingState(64, 64, first_batch_size=64, lr_decay=decay, **more)


@property_test(100)
@given(first=st.integers(1, 5000), cuts=st.integers(0, 40))
def test_a_cut_by_x_grows_the_batch_by_x(first, cuts):
    now = TrainingState(7, 7, first_batch_size=first, lr_decay=2.0**-cuts)
    assert first * 2**cuts == Seesaw().decide(None, now).batch_size


@pytest.mark.parametrize("bounds", [(1000, None), (None, 1000), (1000, 3000)])
def test_a_rate_of_zero_grows_the_batch_to_its_bound(bounds):
    of_policy, controllers = bounds
    now = at(0.0, max_batch=controllers)
    assert 1000 == Seesaw(max_batch=of_policy).decide(None, now).batch_size
    assert 64 == Seesaw().decide(None, at(0.0)).batch_size  # without a bound it stays


def test_the_cap_limits_the_growth_and_never_shrinks_the_first_batch():
    seesaw = Seesaw(cap=NoiseScale())
    assert 256 == seesaw.decide(NOISE, at(0.25)).batch_size
    capped = seesaw.decide(NOISE, at(0.125))
    assert (300, "capped: 1 x noise scale 300") == (capped.batch_size, capped.reason.split("; ")[1])
    little = GradientStatistics(1.0, 10.0, samples=64, micro_batches=4)
    assert 64 == seesaw.decide(little, at(0.25)).batch_size


def test_a_cap_that_only_tries_a_size_makes_the_decision_a_trial():
    cap = Goodput()
    decision = Seesaw(cap=cap).decide(NOISE, at(0.1))
    assert decision.trial
    assert decision.batch_size == max(64, cap.decide(NOISE, at(0.1)).batch_size)
    assert not Seesaw(cap=NoiseScale()).decide(NOISE, at(0.1)).trial


def test_statistics_are_needed_by_the_cap_alone():
    assert not Seesaw().needs.statistics
    assert not Seesaw(cap=Fixed(300)).needs.statistics
    assert Seesaw(cap=NoiseScale()).needs.statistics
    assert not Seesaw().needs.average
    assert Seesaw(cap=NoiseScale()).needs.average
    with pytest.warns(UserWarning, match="set smoothing="):
        Controller(Seesaw(cap=NoiseScale()), 64, smoothing=None)


def test_the_switch_is_at_a_share_of_the_largest_rate():
    policy = LateSwitch(0.3, Fixed(1024))
    decays = [1.0, 0.31, 0.1 * 0.3 / 0.1, 0.01, 0.5]
    sizes = [policy.decide(None, at(decay)).batch_size for decay in decays]
    assert [64, 64, 1024, 1024, 64] == sizes


def test_a_late_switch_needs_what_its_policy_needs():
    assert Needs(statistics=False, lr_decay=True) == LateSwitch(0.5, Fixed(8)).needs
    bounded = NoiseScale(max_batch=9)
    assert replace(bounded.needs, lr_decay=True) == LateSwitch(0.5, bounded).needs
    assert Seesaw().needs == LateSwitch(0.5, Seesaw()).needs
    schedule = Schedule("8, x2 at 9 steps up to 12, then decay")
    assert LateSwitch(0.5, schedule).needs.lr_scaling is None
    assert replace(Seesaw().needs, lr_scaling="any") == Shadow(Seesaw()).needs


def test_a_schedule_is_not_taken_for_a_cap():
    with pytest.raises(TypeError, match="positional"):
        Seesaw(Schedule("64, x2 at 9 steps"))


@pytest.mark.parametrize("policy", [Seesaw(), LateSwitch(0.3, Fixed(8))], ids=str)
def test_without_a_scheduled_rate_the_remedy_is_named(policy):
    with pytest.raises(SettingError, match=r"lr_decay is None.*TrainingState\(lr_decay=\)"):
        policy.decide(None, at(None))


@pytest.mark.parametrize("build", [lambda p: Seesaw(cap=p), lambda p: LateSwitch(0.5, p)])
def test_the_state_of_an_inner_policy_is_saved(build):
    controller = Controller(build(Patient()), 64)
    assert controller.state_dict()["policy"] is not None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Seesaw(cap=8), "cap=8 has no method decide"),
        (lambda: LateSwitch(0.5, SimiGrad), r"SimiGrad is a class; pass SimiGrad\(\.\.\.\)"),
        (lambda: LateSwitch(1.5, Fixed(8)), "at=1.5 must be"),
        (lambda: LateSwitch("60 epochs", Fixed(8)), "at='60 epochs' must be"),
        (lambda: parse_policy("late-switch:0.3"), "write late-switch:at=...; policy=..."),
        (lambda: parse_policy("late-switch:0.3; policy=magic"), "policy 'magic' is unknown"),
        (lambda: parse_policy("seesaw:x2"), "policy 'x2' is unknown"),
        (lambda: parse_policy("seesaw:cap=simigrad:goal=1"), "'goal=1' is none of simigrad"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(make, words):
    with pytest.raises(SettingError, match=words):
        make()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("seesaw", Seesaw()),
        ("seesaw:max_batch=512", Seesaw(max_batch=512)),
        (
            "seesaw:cap=noise-scale:multiple=2,max_batch=99; max_batch=512",
            Seesaw(cap=NoiseScale(2, max_batch=99), max_batch=512),
        ),
        (
            "late-switch:0.5; policy=simigrad:target=0.3,max_batch=512",
            LateSwitch(0.5, SimiGrad(0.3, max_batch=512)),
        ),
        ("late-switch:at=0.3; policy=fixed:512", LateSwitch(0.3, Fixed(512))),
    ],
)
def test_a_text_names_them(text, policy):
    assert policy == parse_policy(text)
