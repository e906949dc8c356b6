"""The one stateful object of the decision."""

import contextlib
import io
import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import bigbatch as bb
from bigbatch import (
    BatchPlan,
    Controller,
    Decision,
    Fixed,
    GradientStatistics,
    LateSwitch,
    Needs,
    NoiseAverage,
    NoiseScale,
    Schedule,
    Seesaw,
    Shadow,
    SimiGrad,
    TrainingState,
)
from bigbatch.errors import SettingError
from bigbatch.policies.controller import controller_of
from bigbatch.policies.plan import PlanConstraints
from bigbatch.statistics.averages import AdaptiveAverage
from property_tests import property_test


def low(samples=64):
    return GradientStatistics(0.0, 1.0, samples, micro_batches=4)


def high(samples=64):
    return GradientStatistics(1.0, 0.0, samples, micro_batches=4)


class HoldUntil:
    """DESIGN section 3, letter for letter."""

    def decide(self, noise: bb.GradientStatistics, now: bb.TrainingState) -> bb.Decision:
        return bb.Decision(
            batch_size=now.target_batch_size if now.samples < 10_000 else 4096,
            reason="warm-up",
            lr_factor=1.0,
        )


class Listens:
    """A policy that keeps what it was given."""

    def __init__(self):
        self.heard = []

    def decide(self, noise, now):
        self.heard.append((noise, now))
        return Decision(now.target_batch_size + 1, "one more", lr_factor=0.5)


def test_it_starts_where_it_is_asked_and_asks_after_every_step():
    controller = Controller(SimiGrad(target=0.2), batch_size=128, smoothing=None)
    assert Decision(128, "start") == controller.decision
    assert 140 == controller.next(low(128)).batch_size
    assert 140 == controller.decision.batch_size
    assert 126 == controller.next(high(140)).batch_size


def test_the_target_is_remembered_as_decided_not_as_cut():
    controller = Controller(SimiGrad(target=0.2), batch_size=24, smoothing=None)
    wanted, cut = [], []
    for _ in range(6):
        plan = BatchPlan.fit(controller.decision.batch_size, ranks=8, max_micro=64)
        wanted.append(controller.decision.batch_size)
        cut.append(plan.batch_size)
        controller.next(low(samples=plan.batch_size))
    assert [24, 26, 28, 30, 33, 36] == wanted
    assert [24, 24, 24, 32, 32, 32] == cut  # fed back, 24 would stay 24 for ever


def test_bounds_clamp_what_is_remembered():
    controller = Controller(SimiGrad(target=0.2), 128, min_batch=100, max_batch=300, smoothing=None)
    sizes = [controller.next(low()).batch_size for _ in range(40)]
    assert [300] * 20 == sizes[-20:]
    assert 270 == controller.next(high()).batch_size  # at once: no overshoot has to be undone
    sizes = [controller.next(high()).batch_size for _ in range(40)]
    assert 100 == min(sizes) == sizes[-1]
    assert 110 == controller.next(low()).batch_size


@pytest.mark.parametrize(("start", "expected"), [(10, 100), (200, 200), (1000, 300)])
def test_bounds_hold_from_the_first_step(start, expected):
    controller = Controller(Fixed(200), start, min_batch=100, max_batch=300)
    assert expected == controller.decision.batch_size


def test_a_policys_own_bounds_hold_from_the_first_step():
    assert 1024 == Controller(SimiGrad(min_batch=1024), batch_size=128).decision.batch_size
    assert 64 == Controller(SimiGrad(max_batch=64), batch_size=128).decision.batch_size


def test_bounds_clamp_a_policy_that_knows_nothing_of_them():
    controller = Controller(Fixed(4096), 128, max_batch=1000)
    assert Decision(1000, "fixed") == controller.next(low())


def test_a_policy_of_ones_own_is_asked_with_what_the_controller_counted():
    controller = Controller(HoldUntil(), batch_size=128)
    sizes = [controller.next(low(samples=3000)).batch_size for _ in range(5)]
    assert [128, 128, 128, 4096, 4096] == sizes


def test_a_policy_hears_the_target_and_the_counts():
    policy = Listens()
    controller = Controller(policy, batch_size=128, base_batch=32)
    noise = low(samples=96)
    assert Decision(129, "one more", lr_factor=0.5) == controller.next(noise)
    controller.next(noise)
    expected = TrainingState(
        target_batch_size=129, batch_size=96, samples=192, steps=2, first_batch_size=128
    )
    assert [(noise, expected)] == policy.heard[1:]


def test_a_policy_hears_the_progress_that_a_loop_states_with_the_target_filled_in():
    policy = Listens()
    stated = TrainingState(7, 96, samples=10**6, steps=5, epoch=3, lr_decay=0.5)
    Controller(policy, batch_size=128).next(low(), stated)
    expected = replace(stated, target_batch_size=128, first_batch_size=128)
    assert expected == policy.heard[0][1]


def test_the_base_batch_is_where_it_starts_unless_stated():
    assert 128 == Controller(Fixed(8), 128).base_batch
    assert 32 == Controller(Fixed(8), 128, 32).base_batch


@pytest.mark.parametrize(("asked", "warnings_"), [(1, 0), (3, 1), (4, 0), (16, 0)])
def test_only_whoever_asked_for_a_lower_bound_is_warned_that_it_is_raised(asked, warnings_):
    cutting = PlanConstraints(
        virtual_ranks=1, micro_batch=16, fixed_micro_batch=False, min_micro_batches=4
    )
    with warnings.catch_warnings(record=True, action="always") as said:
        policy = SimiGrad(min_batch=asked)
        controller = controller_of(policy, cutting, batch_size=64, base_batch=None, samples=960)
    assert max(asked, 4) == controller.min_batch
    assert warnings_ == len(said)


@pytest.mark.parametrize("answer", [None, 256, (256, "more"), {"batch_size": 256}])
def test_a_policy_that_returns_something_else_is_refused(answer):
    class Wrong:
        def decide(self, noise, now):
            return answer

    controller = Controller(Wrong(), batch_size=128)
    with pytest.raises(SettingError, match="not a Decision"):
        controller.next(low())
    assert 128 == controller.decision.batch_size


@pytest.mark.parametrize("policy", [None, "simigrad", lambda noise, now: None])
def test_a_policy_that_cannot_decide_is_refused(policy):
    with pytest.raises(SettingError, match="policy"):
        Controller(policy, batch_size=128)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 12.5}, "batch_size=12.5"),
        ({"base_batch": 0}, "base_batch=0"),
        ({"min_batch": 0}, "min_batch=0"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"min_batch": 512, "max_batch": 256}, "min_batch=512 exceeds max_batch=256"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(wrong, words):
    with pytest.raises(SettingError, match=words):
        Controller(Fixed(8), **{"batch_size": 128, **wrong})


def test_a_saved_controller_continues_as_if_it_had_never_stopped():
    steps = [low(), low(), high(), low(3000), high(), low()]
    unbroken, before = Controller(Listens(), 128), Controller(Listens(), 128)
    expected = [unbroken.next(one) for one in steps][3:]
    for one in steps[:3]:
        before.next(one)
    after = Controller(Listens(), 7, 128)  # started elsewhere, with the same base batch
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert before.decision.batch_size == after.decision.batch_size
    assert before.decision.lr_factor == after.decision.lr_factor
    assert expected == [after.next(one) for one in steps[3:]]
    assert unbroken.policy.heard[3:] == after.policy.heard
    assert unbroken.state_dict() == after.state_dict()


def test_a_loaded_target_obeys_the_bounds_given_now():
    controller = Controller(SimiGrad(target=0.2), 128, max_batch=256)
    with pytest.warns(UserWarning, match="max_batch was None, is 256"):
        controller.load_state_dict(Controller(SimiGrad(target=0.2), 4096).state_dict())
    assert 256 == controller.decision.batch_size


# options


def seen(B, noise_scale=1000.0):
    """What a step of B samples measures exactly."""
    return GradientStatistics(1.0, noise_scale, B, micro_batches=8)


def walk(controller, steps, noise_scale=1000.0, rounded=lambda B: B):
    """The targets after each of so many steps at one noise scale."""
    return [
        controller.next(seen(rounded(controller.decision.batch_size), noise_scale)).batch_size
        for _ in range(steps)
    ]


def test_a_policy_is_asked_every_nth_step_only():
    policy = Listens()
    controller = Controller(policy, 128, decide_every=3)
    assert [128, 128, 129, 129, 129, 130] == walk(controller, 6)
    assert [3, 6] == [now.steps for _, now in policy.heard]
    assert "decides every 3 steps" in controller.next(low()).reason
    assert 0.5 == controller.decision.lr_factor


def test_a_warm_up_holds_the_batch_and_fills_the_average():
    controller = Controller(
        SimiGrad(target=0.2), 128, warmup="1000 samples", smoothing="4000 samples"
    )
    reasons = [controller.next(low(samples=128)).reason for _ in range(7)]
    assert {"held: warm-up of 1000 samples"} == set(reasons)
    assert 128 == controller.decision.batch_size
    last = controller.next(GradientStatistics(8.0, 1.0, 104, 4))  # sample 1,000
    signal = 8 * math.expm1(-104 / 4000) / math.expm1(-1000 / 4000)  # the seven before have none
    assert pytest.approx(signal / (signal + 2 / 104), abs=1e-3) == float(last.reason.split()[1])
    assert 115 == last.batch_size


def test_smoothing_hands_the_policy_the_average():
    policy, average = Listens(), NoiseAverage(250)
    controller = Controller(policy, 128, smoothing="250 samples")
    for noise in (low(), high(100), low(300)):
        controller.next(noise)
        assert average.update(noise) == policy.heard[-1][0]


def test_a_step_without_a_number_does_not_enter_the_average():
    one, other = (Controller(SimiGrad(0.2), 128, smoothing="500 samples") for _ in range(2))
    for noise in (low(), GradientStatistics(math.nan, math.inf, 64, 4), high(100)):
        one.next(noise)
    for noise in (low(), high(100)):
        other.next(noise)
    assert other.state_dict()["average"] == one.state_dict()["average"]


@pytest.mark.parametrize("noise_scale", [100.0, 1000.0, 123_456.7])
@pytest.mark.parametrize("start", [1, 40, 10**6])
def test_simigrad_comes_to_rest_in_a_dead_band_and_never_without(noise_scale, start):
    at_rest = noise_scale * 2 * 0.3 / 0.7
    controller = Controller(SimiGrad(0.3), start, dead_band=0.15, smoothing=None)
    late = walk(controller, 250, noise_scale)[-50:]
    assert 1 == len(set(late))
    assert at_rest / 1.15 <= late[0] <= at_rest * 1.15
    free = Controller(SimiGrad(0.3), start, smoothing=None)
    assert len(set(walk(free, 250, noise_scale)[-50:])) > 1


@given(
    noise_scale=st.floats(20, 1e6),
    start=st.integers(1, 10**6),
    target=st.floats(0.1, 0.9),
    quantum=st.integers(1, 3),
)
@property_test(50)
def test_simigrad_comes_to_rest_where_batches_are_cut_too(noise_scale, start, target, quantum):
    assume(noise_scale * 2 * target / (1 - target) > 40 * quantum)  # so whole numbers matter little
    controller = Controller(SimiGrad(target), start, dead_band=0.25, smoothing=None)
    late = walk(controller, 300, noise_scale, lambda B: -(-B // quantum) * quantum)[-20:]
    assert 1 == len(set(late))


@pytest.mark.parametrize(("dead_band", "batches"), [(0.15, {256, 512}), (0.3, {512})])
def test_a_coarse_cut_swings_for_ever_unless_the_dead_band_is_wider(dead_band, batches):
    def cut(batch):
        return bb.BatchPlan.fit(batch, 8, max_micro=32, micro=32).batch_size

    controller = Controller(SimiGrad(1 / 3), 256, dead_band=dead_band, smoothing=None)
    assert batches == {cut(target) for target in walk(controller, 250, 400.0, cut)[-50:]}


@pytest.mark.parametrize(
    ("present", "expected"), [(870, 870), (869, 1000), (1149, 1149), (1151, 1000)]
)
def test_the_dead_band_of_a_direct_policy_is_a_ratio_to_where_it_goes(present, expected):
    controller = Controller(
        NoiseScale(), present, dead_band=0.15, smoothing="256 samples", max_change=None
    )
    decision = controller.next(seen(64))
    assert expected == decision.batch_size
    assert ("held: inside the dead band of 0.15" in decision.reason) == (present == expected)


@pytest.mark.parametrize(
    ("present", "wanted", "moves"), [(6, 7, True), (7, 8, False), (20, 17, True), (20, 18, False)]
)
def test_the_dead_band_is_exact_in_whole_numbers(present, wanted, moves):
    assert moves == (max(wanted / present, present / wanted) > 1.15)
    controller = Controller(
        NoiseScale(), present, dead_band=0.15, smoothing="256 samples", max_change=None
    )
    expected = wanted if moves else present
    assert expected == controller.next(seen(64, noise_scale=wanted)).batch_size


@pytest.mark.parametrize(
    ("present", "expected"), [(860, 861), (880, 880), (1140, 1140), (1160, 1159)]
)
def test_a_policy_of_ones_own_that_reads_the_cut_batch_is_held_in_the_dead_band_too(
    present, expected
):
    class Nears:
        def decide(self, noise, now):
            way = 1 if now.batch_size < noise.noise_scale else -1
            return Decision(now.target_batch_size + way, "one nearer")

    controller = Controller(Nears(), present, dead_band=0.15)
    assert expected == controller.next(seen(present)).batch_size


@pytest.mark.parametrize("bounds", [{"max_batch": 512}, {"min_batch": 512}])
@pytest.mark.parametrize("inner", [True, False])
def test_a_dead_band_does_not_keep_the_batch_from_its_bounds(bounds, inner):
    policy = SimiGrad(0.3, **bounds) if inner else SimiGrad(0.3)
    noise_scale, start = (1e6, 8) if "max_batch" in bounds else (1.0, 10**5)
    controller = Controller(policy, start, dead_band=0.15, smoothing=None, **bounds)
    assert 512 == walk(controller, 100, noise_scale)[-1]


def test_a_held_decision_says_why_and_keeps_its_factor():
    class Halves:
        def decide(self, noise, now):
            size = now.target_batch_size + (1 if noise.similarity < 0.5 else -1)
            return Decision(size, "one more", lr_factor=0.5)

    decision = Controller(Halves(), 100, dead_band=0.5).next(seen(100, noise_scale=60.0))
    assert Decision(100, "one more; held: inside the dead band of 0.5", 0.5) == decision


@given(
    noises=st.lists(st.floats(-10, 1e4), min_size=1, max_size=40),
    start=st.integers(1, 10**5),
    factor=st.floats(1.0001, 10),
)
def test_no_decision_moves_farther_than_the_largest_step(noises, start, factor):
    controller = Controller(NoiseScale(), start, max_change=factor, smoothing="1 sample")
    before = start
    for signal in noises:
        after = controller.next(GradientStatistics(signal, 1e4, 64, 8)).batch_size
        assert before / factor <= after <= before * factor or abs(after - before) == 1
        before = after


def test_what_is_far_away_is_reached_by_largest_steps():
    falling = Controller(NoiseScale(min_batch=20), 256, max_change=2, smoothing="1 sample")
    assert [128, 64, 32, 20] == walk(falling, 4, noise_scale=0.0)
    rising = Controller(NoiseScale(max_batch=500), 64, max_change=2, smoothing="1 sample")
    assert [128, 256, 500, 500] == walk(rising, 4, noise_scale=1e6)


@pytest.mark.parametrize("start", [*range(1, 40), 1000])
@pytest.mark.parametrize("way", [low, high])
def test_no_whole_number_stalls_the_batch(start, way):
    for policy in (SimiGrad(0.2), NoiseScale(max_batch=10**6)):
        options = {"max_change": 1.01, "smoothing": "64 samples", "dead_band": 0.01}
        controller = Controller(policy, start, **options)
        after = controller.next(way()).batch_size
        assert after > start if way is low else after < start or start == 1


def test_a_start_without_noise_runs_away_no_farther_than_it_may():
    runaway = [
        Controller(policy, 256, smoothing="1 sample") for policy in (SimiGrad(0.2), NoiseScale())
    ]
    assert [1, 1] == [walk(one, 60, noise_scale=0.0)[-1] for one in runaway]
    for policy in (SimiGrad(0.2, min_batch=64), NoiseScale(min_batch=64)):
        assert 64 == walk(Controller(policy, 256, smoothing="1 sample"), 60, noise_scale=0.0)[-1]
        patient = Controller(policy, 256, smoothing="1 sample", warmup="2560 samples")
        assert {256} == set(walk(patient, 9, noise_scale=0.0))
        slow = Controller(policy, 256, smoothing="1 sample", max_change=1.1)
        assert 64 < walk(slow, 9, noise_scale=0.0)[-1] < 256


# averages


def after(steps, batch_size=128):
    """Where a training stands after so many steps of one size."""
    return TrainingState(0, batch_size, samples=batch_size * steps, steps=steps)


class WantsAverage(Listens):
    """The same, for one that wants averages."""

    needs = Needs(average=True)


def noisy(seed, steps, samples=128):
    """Steps that scatter around a signal of 1 and a noise of 1,000."""
    generator = torch.Generator().manual_seed(seed)
    for s, n in torch.randn(steps, 2, generator=generator, dtype=torch.float64).tolist():
        yield GradientStatistics(1.0 + 0.5 * s, 1000.0 + 100.0 * n, samples, 8)


def test_by_default_a_policy_that_wants_it_hears_an_adaptive_average():
    controller, average = Controller(WantsAverage(), 128), AdaptiveAverage()
    wanted = [average.update(noise) for noise in noisy(0, 40)]
    for noise in noisy(0, 40):
        controller.next(noise)
    assert wanted[3:] == [heard for heard, _ in controller.policy.heard]
    assert 128 + 37 == controller.decision.batch_size


@pytest.mark.parametrize(
    ("policy", "options"),
    [(Listens(), {}), (Listens(), {"smoothing": None}), (WantsAverage(), {"smoothing": None})],
)
def test_any_other_policy_and_one_without_smoothing_hear_single_steps(policy, options):
    controller = Controller(policy, 128, **options)
    for noise in noisy(0, 5):
        controller.next(noise)
    assert list(noisy(0, 5)) == [heard for heard, _ in policy.heard]
    assert controller.needs_measurement


@pytest.mark.parametrize(
    ("smoothing", "steps"), [("auto", 3), ("16 steps", 3), ("40 steps", 9), ("1024 samples", 1)]
)
@pytest.mark.parametrize("policy", [SimiGrad(0.2), NoiseScale()], ids=str)
def test_the_batch_keeps_its_size_until_a_quarter_of_the_window_is_filled(policy, smoothing, steps):
    controller = Controller(policy, 128, smoothing=smoothing)
    for number in range(steps):
        assert controller.needs_measurement
        with pytest.raises(SettingError, match="needs the statistics of the step"):
            controller.next(None, after(number))
        assert Decision(128, "held: the average fills") == controller.next(seen(128))
    assert controller.next(seen(128)).batch_size > 128
    assert not controller.needs_measurement


def test_then_a_step_that_was_not_measured_decides_by_the_average_at_its_own_size():
    controller = Controller(SimiGrad(target=0.2), 128)
    for _ in range(4):
        controller.next(seen(128))  # a noise scale of 1,000
    average = controller.state_dict()["average"]
    # phi = N / (N + 2 B_simple)
    assert Decision(154, "similarity 0.060 < 0.2") == controller.next(None, after(5, 128))
    assert Decision(138, "similarity 0.714 > 0.2") == controller.next(None, after(6, 5000))
    assert average == controller.state_dict()["average"]  # it is not a measurement


def test_steps_that_were_not_measured_count_for_decide_every_once_they_decide():
    controller = Controller(SimiGrad(target=0.2), 128, decide_every=3)
    reasons = [controller.next(seen(128)).reason for _ in range(4)]
    reasons += [controller.next(None, after(n)).reason for n in range(5, 10)]
    filling, between = ["held: the average fills"] * 3, "held: decides every 3 steps"
    asked = "similarity 0.060 < 0.2"
    assert [*filling, between, between, asked, between, between, asked] == reasons


def test_a_warm_up_holds_steps_that_were_not_measured_too():
    controller = Controller(SimiGrad(target=0.2), 128, warmup="7 steps")
    for _ in range(4):
        controller.next(seen(128))
    reasons = [controller.next(None, after(n)).reason for n in (5, 6, 7)]
    assert [*["held: warm-up of 7 steps"] * 2, "similarity 0.060 < 0.2"] == reasons


@pytest.mark.parametrize("policy", [Fixed(96), Schedule("64"), Shadow(Fixed(96))], ids=str)
@pytest.mark.parametrize("smoothing", ["auto", "16 steps", None])
def test_what_needs_no_statistics_needs_no_measurement_and_waits_for_no_average(policy, smoothing):
    controller = Controller(policy, 64, smoothing=smoothing)
    assert not controller.needs_measurement
    assert "held" not in controller.next(None, after(1, 64)).reason
    assert "held" not in controller.next(seen(64)).reason


@pytest.mark.parametrize("stop", [0, 2, 4, 7, 30])
@pytest.mark.parametrize("smoothing", ["auto", "16 steps", "2K samples"])
def test_it_resumes_between_steps_that_were_not_measured(smoothing, stop):
    policy = SimiGrad(0.1)
    noises = [noise if n < 4 or n % 3 == 0 else None for n, noise in enumerate(noisy(2, 40))]
    steps = [(noise, after(n + 1)) for n, noise in enumerate(noises)]
    unbroken, before, resumed = (Controller(policy, 128, smoothing=smoothing) for _ in range(3))
    expected = [unbroken.next(*step) for step in steps]
    assert len({decision.batch_size for decision in expected}) > 5
    for step in steps[:stop]:
        before.next(*step)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert before.needs_measurement == resumed.needs_measurement
    assert expected[stop:] == [resumed.next(*step) for step in steps[stop:]]
    assert repr(unbroken.facts()) == repr(resumed.facts())


@pytest.mark.parametrize(("old", "new"), [("auto", "16 steps"), ("4000 samples", "auto")])
def test_an_average_of_another_kind_is_not_loaded(old, new):
    before, resumed = (Controller(SimiGrad(0.2), 128, smoothing=s) for s in (old, new))
    walk(before, 12)
    with pytest.warns(UserWarning, match=f"smoothing was '{old}', is '{new}'"):
        resumed.load_state_dict(before.state_dict())
    assert before.decision.batch_size == resumed.decision.batch_size > 128
    reasons = [resumed.next(high(128)).reason for _ in range(4)]
    assert [*["held: the average fills"] * 3, "similarity 1.000 > 0.2"] == reasons


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Fixed(130), [130] * 5),
        (Schedule("128, 130 from 200 samples, 129 from 300 samples"), [128, 130, 129, 129, 129]),
        (Schedule("128 to 133 over 400 samples"), [129, 130, 131, 133, 133]),
    ],
)
def test_what_does_not_look_at_noise_is_held_by_no_doubt_about_it(policy, expected):
    controller = Controller(policy, 128, dead_band=0.5)
    assert expected == [controller.next(seen(100)).batch_size for _ in range(5)]


@pytest.mark.filterwarnings("ignore:.* goes by one step")
def test_a_direct_policy_at_its_lower_bound_is_doubted_like_any_other():
    near = Controller(NoiseScale(), 900, dead_band=0.2, min_batch=900, smoothing=None)
    assert 900 == near.next(seen(900)).batch_size


def test_advice_leaves_the_batch_alone_and_is_reported():
    advised = Shadow(SimiGrad(target=0.2, max_batch=135))
    controller = Controller(advised, 128, dead_band=0.1, smoothing=None)
    decision = controller.next(low(128))
    assert (128, 135, 1.0) == (decision.batch_size, decision.advice, decision.lr_factor)
    assert 64 == Controller(Shadow(Fixed(96)), 64).next(low()).batch_size
    assert 135 == Controller(Shadow(SimiGrad(max_batch=135)), 4096).decision.batch_size


@pytest.mark.parametrize("policy", [NoiseScale(), Shadow(NoiseScale())])
def test_a_policy_that_one_steps_noise_scale_decides_is_named_once(policy):
    with pytest.warns(UserWarning, match=r"one step's noise scale.*smoothing=\"auto\"") as said:
        controller = Controller(policy, 128, smoothing=None)
    assert 1 == len(said)
    with warnings.catch_warnings(action="error"):
        walk(controller, 3)
        for smoothing in ("auto", "10000 samples"):
            Controller(policy, 128, smoothing=smoothing)
        for other in (SimiGrad(), Shadow(SimiGrad())):
            Controller(other, 128, smoothing=None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"decide_every": 0}, "decide_every=0"),
        ({"decide_every": 1.5}, "decide_every=1.5"),
        ({"smoothing": "0 samples"}, "smoothing='0 samples' must be .*text such as \"16 steps\""),
        ({"smoothing": "none"}, "smoothing='none' must be .*\"auto\", .* or None"),
        ({"smoothing": 500}, "smoothing=500"),
        ({"smoothing": "2 epochs"}, "smoothing='2 epochs'"),
        ({"dead_band": -0.1}, "dead_band=-0.1"),
        ({"dead_band": math.nan}, "dead_band=nan"),
        ({"max_change": 1.0}, "max_change=1.0"),
        ({"max_change": math.nan}, "max_change=nan"),
        ({"warmup": 500}, "warmup=500"),
        ({"warmup": "0.5 epochs"}, "warmup='0.5 epochs'"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(wrong, words):
    with pytest.raises(SettingError, match=words):
        Controller(SimiGrad(), 128, **wrong)


# every policy with every option

POLICIES = [
    Fixed(96),
    SimiGrad(0.3),
    NoiseScale(0.5),
    Schedule("64, x2 every 500 samples up to 300, then decay"),
    Shadow(SimiGrad(0.3)),
    Seesaw(cap=NoiseScale(0.5), max_batch=300),
    LateSwitch(0.3, SimiGrad(0.3)),
]
OPTIONS = [
    {},
    {"decide_every": 3},
    {"smoothing": None},
    {"smoothing": "700 samples"},
    {"dead_band": 0.1},
    {"dead_band": 0.2},
    {"max_change": 1.05},
    {"warmup": "1000 samples"},
    {"decide_every": 2, "smoothing": "300 samples", "dead_band": 0.1, "max_change": 1.5},
]
steps_seen = st.lists(
    st.builds(
        GradientStatistics,
        grad_sqnorm=st.floats(-1, 10) | st.just(math.nan),
        grad_variance=st.just(0.0) | st.floats(1e-9, 1e4),
        samples=st.integers(1, 500),
        micro_batches=st.just(8),
    ),
    min_size=1,
    max_size=30,
)


def over_policies_and_options(test):
    test = pytest.mark.parametrize("policy", POLICIES, ids=str)(test)
    test = pytest.mark.parametrize("options", OPTIONS, ids=str)(test)
    return pytest.mark.late(pytest.mark.filterwarnings("ignore:.* goes by one step")(test))


def with_states(noises):
    """Each step with the state of a training whose learning rate falls."""
    samples = 0
    for steps, noise in enumerate(noises, start=1):
        samples += noise.samples
        size = noise.samples
        yield noise, TrainingState(0, size, samples=samples, steps=steps, lr_decay=0.8**steps)


@over_policies_and_options
@given(noises=steps_seen, start=st.integers(1, 2000))
@property_test(20)
def test_bounds_hold_always_and_a_batch_is_whole(policy, options, noises, start):
    controller = Controller(policy, start, min_batch=50, max_batch=400, **options)
    sizes = [controller.decision.batch_size]
    sizes += [controller.next(*step).batch_size for step in with_states(noises)]
    assert all(isinstance(size, int) and 50 <= size <= 400 for size in sizes)
    most = options.get("max_change", math.inf)
    assert all(
        before / most <= after <= before * most or abs(after - before) == 1
        for before, after in pairwise(sizes)
    )


@over_policies_and_options
@given(noises=steps_seen, data=st.data())
@property_test(20)
def test_a_resumed_controller_decides_as_if_never_stopped(policy, options, noises, data):
    stop, steps = data.draw(st.integers(0, len(noises))), [*with_states(noises)]
    unbroken, before, after = (Controller(policy, 128, **options) for _ in range(3))
    expected = [unbroken.next(*step) for step in steps][stop:]
    for step in steps[:stop]:
        before.next(*step)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    assert repr(before.facts()) == repr(after.facts())
    assert expected == [after.next(*step) for step in steps[stop:]]
    assert repr(unbroken.facts()) == repr(after.facts())


# state


def test_settings_that_changed_are_named_once_and_the_new_ones_hold():
    before = Controller(SimiGrad(0.2), 128, decide_every=2)
    controller = Controller(SimiGrad(0.3), 128, decide_every=1, dead_band=0.1)
    with pytest.warns(UserWarning, match="the new one is used") as said:
        controller.load_state_dict(before.state_dict())
    assert 1 == len(said)
    message = str(said[0].message)
    assert "policy was SimiGrad(target=0.2, " in message
    assert "every was 2, is 1" in message
    assert "dead_band was 0, is 0.1" in message
    assert "base_batch" not in message
    for _ in range(3):
        assert 128 == controller.next(low(128)).batch_size  # the average fills
    assert 140 == controller.next(low(128)).batch_size
    assert 154 == controller.next(low(128)).batch_size  # decide_every=1


def test_a_saved_setting_that_is_gone_is_named_unless_it_was_none():
    state = Controller(SimiGrad(), 128).state_dict()
    state["settings"] |= {"confidence": "0.9", "veto": "None"}
    with pytest.warns(UserWarning, match="^confidence was 0.9, is None: the new one is used$"):
        Controller(SimiGrad(), 128).load_state_dict(state)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("base_batch", 64),
        ("min_batch", 2),
        ("max_batch", 256),
        ("decide_every", 2),
        ("smoothing", "500 samples"),
        ("smoothing", None),
        ("dead_band", 0.1),
        ("max_change", 1.5),
        ("warmup", "100 samples"),
    ],
)
def test_every_option_that_changed_is_named_and_makes_another_digest(option, value):
    before, after = Controller(SimiGrad(), 128), Controller(SimiGrad(), 128, **{option: value})
    assert repr(before.facts()) != repr(after.facts())
    with pytest.warns(UserWarning, match=f"^{option} was .*, is {value!r}: the new one is used"):
        after.load_state_dict(before.state_dict())


def test_an_average_that_is_new_or_gone_begins_or_ends():
    smooth, rough = (Controller(SimiGrad(0.2), 128, smoothing=s) for s in ("500 samples", None))
    for one in (smooth, rough):
        walk(one, 3)
    fresh = Controller(SimiGrad(0.2), 128, smoothing="500 samples")
    with pytest.warns(UserWarning, match="smoothing was None, is '500 samples'"):
        fresh.load_state_dict(rough.state_dict())
    assert "similarity 1.000" in fresh.next(high(128)).reason
    with pytest.warns(UserWarning, match="smoothing was '500 samples', is None"):
        rough.load_state_dict(smooth.state_dict())
    assert "similarity 1.000" in rough.next(high()).reason


DIGEST = """
from bigbatch import Controller, GradientStatistics, Shadow
class Mine:
    def decide(self, noise, now): ...
controller = Controller(Shadow(Mine()), 128, smoothing="500 samples")
print(repr(controller.facts()))
"""


def test_the_digest_is_the_same_in_every_process_and_changes_with_what_matters():
    command = [sys.executable, "-c", DIGEST]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(DIGEST, {"__name__": "__main__"})
    assert output.getvalue() == printed
    assert "__main__.Mine" in printed
    assert " at 0x" not in printed
    one, other = Controller(SimiGrad(0.2), 128), Controller(SimiGrad(0.2), 128)
    assert repr(one.facts()) == repr(other.facts())
    one.next(low())
    assert repr(one.facts()) != repr(other.facts())
    other.next(low())
    assert repr(one.facts()) == repr(other.facts())
    one.limit(max_batch=10**6)
    assert repr(one.facts()) != repr(other.facts())
    assert repr(Controller(SimiGrad(0.2), 128).facts()) != repr(
        Controller(SimiGrad(0.3), 128).facts()
    )


class Counting:
    """A policy that remembers how often it was asked."""

    def __init__(self):
        self.asked = 0

    def decide(self, noise, now):
        self.asked += 1
        return Decision(10 * self.asked, "counted")

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def test_what_a_policy_of_ones_own_remembers_is_saved_with_it():
    noise = GradientStatistics(1.0, 64.0, samples=10, micro_batches=4)
    first = Controller(Counting(), 10)
    for _ in range(3):
        first.next(noise)
    second = Controller(Counting(), 10)
    second.load_state_dict(first.state_dict())
    assert 40 == first.next(noise).batch_size == second.next(noise).batch_size


def test_a_policy_that_remembers_is_saved_through_advise_too_and_asked_once_a_step():
    noise = GradientStatistics(1.0, 64.0, samples=10, micro_batches=4)
    first = Controller(bb.Shadow(Counting()), 10)
    for _ in range(3):
        first.next(noise)
    second = Controller(bb.Shadow(Counting()), 10)
    second.load_state_dict(first.state_dict())
    assert 40 == first.next(noise).advice == second.next(noise).advice
    with pytest.raises(SettingError, match="one that remembers"):
        Controller(Counting(), 10, dead_band=0.1)


class Wrapper(Counting):
    """One that holds another policy and remembers something itself."""

    def __init__(self):
        super().__init__()
        self.policy = bb.Fixed(96)


class Around:
    """One that remembers nothing itself, around one that does."""

    def __init__(self):
        self.policy = Counting()

    def decide(self, noise, now):
        return self.policy.decide(noise, now)


@pytest.mark.parametrize("build", [Wrapper, Around, lambda: bb.Shadow(bb.Shadow(Counting()))])
def test_what_a_policy_remembers_is_saved_wherever_it_is(build):
    noise = GradientStatistics(1.0, 64.0, samples=10, micro_batches=4)
    first, second = Controller(build(), 10), Controller(build(), 10)
    for _ in range(3):
        first.next(noise)
    second.load_state_dict(first.state_dict())
    assert "counted" in first.next(noise).reason == second.next(noise).reason
    with pytest.raises(SettingError, match="one that remembers"):
        Controller(build(), 10, dead_band=0.1)


def test_a_noise_scale_without_end_goes_to_the_controllers_bound():
    noisy = GradientStatistics(-7.0, 64.0, samples=10, micro_batches=4)
    for policy, options, expected in [
        (bb.NoiseScale(), {"max_batch": 4096}, 4096),
        (bb.NoiseScale(max_batch=512), {"max_batch": 4096}, 512),
        (bb.NoiseScale(), {}, 64),
    ]:
        controller = Controller(policy, 64, smoothing="40 samples", max_change=None, **options)
        assert expected == controller.next(noisy).batch_size


def test_a_window_far_longer_than_the_training_still_averages():
    step = GradientStatistics(1.0, 576.0, samples=128, micro_batches=4)
    controller = Controller(SimiGrad(0.2), 128, smoothing="999999999T samples")
    assert Decision(128, "held: the average fills") == controller.next(step)
    average = NoiseAverage(999_999_999e12)
    average.load_state_dict(controller.state_dict()["average"])
    assert pytest.approx(0.1) == average.at(step).similarity


def test_what_a_bound_keeps_from_a_decaying_schedule_lowers_the_rate():
    schedule = bb.Schedule("64, x4 every 2 steps up to 1024, then decay")
    controller = Controller(schedule, 64, max_batch=512)
    noise = GradientStatistics(1.0, 64.0, samples=64, micro_batches=4)
    seen = [controller.next(noise) for _ in range(6)]
    assert [64, 256, 256, 512, 512, 512] == [decision.batch_size for decision in seen]
    assert [1, 1, 1, 0.5, 0.5, 0.125] == [decision.lr_factor for decision in seen]


@pytest.mark.parametrize(
    ("before", "after"), [("16 steps", "4K samples"), ("4K samples", "16 steps")]
)
def test_an_average_in_another_unit_is_not_taken_over(before, after):
    saved = Controller(SimiGrad(0.2), 64, smoothing=before)
    for _ in range(40):
        saved.next(seen(64, noise_scale=100.0))
    resumed = Controller(SimiGrad(0.2), 64, smoothing=after)
    with pytest.warns(UserWarning, match="smoothing was"):
        resumed.load_state_dict(saved.state_dict())
    fresh = Controller(SimiGrad(0.2), 64, smoothing=after)
    for _ in range(20):
        resumed.next(seen(64, noise_scale=1000.0))
        fresh.next(seen(64, noise_scale=1000.0))
    assert fresh.state_dict()["average"] == resumed.state_dict()["average"]


@pytest.mark.parametrize("wrong", ["2", 0.5, 1.0])
def test_a_largest_change_of_a_policy_is_checked_as_the_controllers_own(wrong):
    with pytest.raises(SettingError, match="max_change="):
        Needs(max_change=wrong)


def test_crossed_bounds_of_a_policy_are_refused():
    with pytest.raises(SettingError, match="min_batch=32 exceeds max_batch=16"):
        Needs(min_batch=32, max_batch=16)


def test_needs_of_another_type_are_refused():
    class Own:
        needs = ("average",)

        def decide(self, noise, now):
            return Decision(8, "own")

    with pytest.raises(SettingError, match=r"Own.needs is .*; set needs = bb.Needs\(...\)"):
        Controller(Own(), 64)


def test_a_step_that_cannot_be_counted_is_not():
    controller = Controller(Fixed(8), 8)
    with pytest.raises(SettingError, match="needs now="):
        controller.next(None)
    assert 0 == controller.state_dict()["steps"]
