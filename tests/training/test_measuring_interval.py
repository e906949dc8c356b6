"""The interval between measured steps, from made-up times: no model, no clock."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bigbatch as bb
from bigbatch.policies.policy import TrainingState
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.measuring_interval import MeasuringInterval
from property_tests import property_test

TIMING = 13  # steps of the first situation: a measured one, then six pairs
PLAIN = 10.0  # seconds


def situation_of(batch_size):
    return (4, 1, batch_size.bit_length() - 1)


class Training:
    """Steps with made-up times: a measured one takes 1 + cost times as long as another."""

    def __init__(self, interval, cost, batch_size=64, noise=lambda _: 1.0):
        self.interval, self.cost, self.noise = interval, cost, noise
        self.batch_size, self.seconds, self.steps = batch_size, 0.0, 0
        self.measured = []  # whether each step was

    def step(self, batch_size=None, *, decides=True):
        """One step, at the end of which a batch size is decided."""
        measured, situation = self.interval.due, situation_of(self.batch_size)
        self.interval.add_seconds(self.seconds)  # of the step before, as ranks know it then
        self.batch_size = batch_size or self.batch_size
        self.interval.end_step(
            situation, situation_of(self.batch_size), self.batch_size, decides=decides
        )
        cost = self.cost(situation) if callable(self.cost) else self.cost
        self.seconds = PLAIN * (1 + cost * measured) * self.noise(self.steps)
        self.steps += 1
        self.measured.append(measured)
        return measured

    def run(self, steps):
        return [self.step() for _ in range(steps)]


def intervals(measured):
    at = [number for number, one in enumerate(measured) if one]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


@pytest.mark.parametrize(("budget", "every", "n"), [(None, None, 1), (0.05, 5, 5), (None, 3, 3)])
def test_a_fixed_interval_is_kept_whatever_steps_cost(budget, every, n):
    training = Training(MeasuringInterval(budget, every), cost=3.0)
    assert [number % n == 0 for number in range(200)] == training.run(200)
    assert (n, f"every={n}") == (training.interval.every, training.interval.reason)


def test_a_budget_of_nothing_measures_no_step():
    training = Training(MeasuringInterval(0.0), cost=3.0)
    assert not any(training.run(50))
    assert (None, "budget=0") == (training.interval.every, training.interval.reason)


@pytest.mark.parametrize(
    ("cost", "budget", "n"),
    [
        (0.0, 0.05, 1),
        (-0.2, 0.05, 1),
        (0.0625, 0.0625, 1),
        (0.0626, 0.0625, 2),
        (0.125, 0.0625, 2),
        (0.25, 0.0625, 4),
        (0.26, 0.0625, 8),
        (1.6, 0.05, 32),
        (1.61, 0.05, 64),
        (0.5, 0.9, 1),
    ],
)
def test_n_is_the_smallest_power_of_two_that_keeps_the_budget(cost, budget, n):
    training = Training(MeasuringInterval(budget), cost)
    timing = training.run(TIMING + 1)
    assert [True, False] * 7 == timing
    assert 2 == training.interval.every
    training.run(1)
    assert n == training.interval.every
    assert [*[False] * (n - 1), True] == training.run(n)


def test_the_reason_says_what_measuring_costs():
    training = Training(MeasuringInterval(0.05), 0.6)
    assert "one step in 2 is, while steps are timed" == training.interval.reason
    training.run(TIMING + 2)
    expected = "one step in 16 is: measuring adds 60% to a step, budget=0.05"
    assert expected == training.interval.reason
    training.run(16 * 20)
    expected = "one step in 64 is: measuring adds 60% to a step, the batch rests, budget=0.05"
    assert expected == training.interval.reason


def test_slow_first_steps_and_a_validation_between_two_steps_do_not_count():
    slow = {0: 50.0, 2: 40.0, 6: 30.0, 10: 25.0}  # compilation, then two validations
    training = Training(MeasuringInterval(0.05), 0.6, noise=lambda step: slow.get(step, 1.0))
    training.run(TIMING + 2)
    assert 16 == training.interval.every


def test_a_machine_that_slows_down_steadily_is_timed_as_one_that_does_not():
    training = Training(MeasuringInterval(0.05), 0.7, noise=lambda step: 1 + step / 100)
    training.run(TIMING + 2)
    assert 16 == training.interval.every


def test_the_interval_doubles_at_rest_up_to_four_times_and_falls_where_the_batch_moves():
    training = Training(MeasuringInterval(0.05), 0.19)  # n0 = 4
    for _ in range(400):
        training.step()
    found = intervals(training.measured)
    # 8 decisions before the batch can rest: 7 while timing, and the first of n0
    assert [2] * 7 + [4, 8] + [16] * 10 == found[:19]
    assert 16 == training.interval.every
    while not training.step():  # up to a measured step
        pass
    for _ in range(4):
        training.step(round(training.batch_size * 1.1))  # while not measured: no decision
    batch_size, moved = training.batch_size, []
    for _ in range(200):
        batch_size = round(1.1 * batch_size) if training.interval.due else batch_size
        training.cost = 0.19
        training.step(batch_size)
        moved.append(training.interval.every)
    assert 4 in moved


def test_an_interval_of_one_stays_one_at_rest():
    training = Training(MeasuringInterval(0.05), 0.0)
    training.run(TIMING + 1)
    assert all(training.run(100))


def walk(training, steps, seed, target=0.3, scale=500):
    """SimiGrad at its fixed point: one tenth up or down a decision, by a noisy similarity."""
    draw, policy = random.Random(seed), bb.SimiGrad(target)
    found = []
    for _ in range(steps):
        size = training.batch_size
        if training.interval.due:
            similarity = 1 / (1 + 2 * scale / size) + draw.gauss(0, 0.08)
            size = policy.next_batch(similarity, size)
        training.step(size)
        found.append(training.interval.every)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_simigrads_walk_about_its_fixed_point_is_rest(seed):
    training = Training(MeasuringInterval(0.05), 0.19, batch_size=430)
    found = walk(training, 4000, seed)[1000:]
    assert sum(found) / len(found) > 0.93 * 16


def test_a_growing_batch_moves():
    training = Training(MeasuringInterval(0.05), 0.19, batch_size=64)
    found = walk(training, 150, 0, scale=10**6)
    assert set(found) <= {2, 4}
    assert training.batch_size > 64 * 1.1**30


def test_a_new_situation_is_timed_at_the_interval_of_the_one_before():
    costs = {situation_of(64): 0.3, situation_of(128): 0.06, situation_of(32): 0.0}
    training = Training(MeasuringInterval(0.05), lambda situation: costs[situation])
    training.run(TIMING + 2)
    assert 8 == training.interval.every
    while not training.interval.due:
        training.step()
    training.step(128)
    assert 8 == training.interval.every
    assert "while steps are timed" in training.interval.reason
    training.run(8 * 7 + 1)
    assert 2 == training.interval.every
    while not training.interval.due:
        training.step()
    training.step(64)  # timed before
    assert "adds 30% to a step" in training.interval.reason


def test_a_new_situation_is_timed_at_n0_although_the_batch_rests():
    training = Training(MeasuringInterval(0.05), 0.19, batch_size=120)
    training.run(300)
    assert 16 == training.interval.every
    while not training.interval.due:
        training.step()
    training.step(128)
    assert 4 == training.interval.every


def test_steps_of_two_situations_are_no_pair():
    training = Training(MeasuringInterval(0.05), 0.6)
    for _ in range(60):  # a schedule that changes the batch after every step
        training.step(64 if training.interval.due else 128)
    assert "while steps are timed" in training.interval.reason


def test_a_situation_where_measuring_is_free_does_not_keep_the_next_from_being_timed():
    training = Training(MeasuringInterval(0.05), lambda situation: 0.0 if situation[2] == 6 else 1)
    training.run(TIMING + 2)
    assert 1 == training.interval.every
    training.step(128)
    assert 2 == training.interval.every
    training.run(TIMING + 4)
    assert 32 == training.interval.every


@pytest.mark.parametrize("every", [3, 8])
def test_a_measured_step_that_cannot_decide_is_repeated_and_made_up_for(every):
    training = Training(MeasuringInterval(None, every), 1.0)
    training.run(every)
    assert training.step(decides=False)  # the end of an epoch
    assert training.step()
    assert not any(training.run(2 * every - 2))
    assert training.step()
    assert [number % every == every - 1 for number in range(50)] == training.run(50)


def test_steps_that_never_decide_keep_the_interval():
    training = Training(MeasuringInterval(None, 8), 1.0)
    for _ in range(800):
        training.step(decides=False)
    assert 100 == sum(training.measured)


def test_steps_that_cannot_decide_are_not_timed():
    training = Training(MeasuringInterval(0.05), 0.6)
    for number in range(40):  # every fourth is the short end of an epoch
        training.noise = lambda _, short=number % 4 == 3: 0.1 if short else 1.0
        training.step(decides=number % 4 != 3)
    training.noise = lambda _: 1.0
    training.run(20)
    assert "adds 60% to a step" in training.interval.reason


@given(
    cost=st.floats(0.0, 5.0),
    budget=st.sampled_from([0.01, 0.05, 0.2]),
    sizes=st.lists(st.integers(64, 127), min_size=1, max_size=30),
    ends=st.lists(st.integers(3, 40), min_size=1, max_size=5),
)
@property_test(200)
def test_measuring_never_takes_more_than_the_budget(cost, budget, sizes, ends):
    training = Training(MeasuringInterval(budget), cost)
    training.run(TIMING + 2)
    training.measured.clear()
    plain = measuring = 0.0
    for number in range(1500):
        due, end = training.interval.due, number % ends[number % len(ends)] == 0
        training.step(sizes[number % len(sizes)], decides=not end)
        plain += PLAIN
        measuring += PLAIN * cost * due
    # the step that is due at the beginning, and one that is repeated at the end
    allowed = budget * (plain + measuring) + 2 * PLAIN * cost
    assert measuring <= allowed * (1 + 1e-9)
    n = training.interval.every
    assert n & (n - 1) == 0


@given(
    seed=st.integers(0, 1000),
    cut=st.integers(0, 120),
    budget=st.sampled_from([0.0, 0.02, 0.05, None]),
    every=st.sampled_from([None, None, 4]),
)
@property_test(100)
def test_a_state_from_any_step_continues_with_the_same_steps(seed, cut, budget, every):
    def scripted():
        draw = random.Random(seed)
        return [
            (draw.randint(33, 400), draw.random() > 0.1, draw.uniform(1, 2)) for _ in range(160)
        ]

    def continued(training, script):
        found = []
        for size, decides, noise in script:
            training.noise = lambda _, noise=noise: noise
            due = training.interval.due
            training.step(size if due else None, decides=decides)
            found.append((due, training.interval.every, training.interval.reason))
        return found

    script = scripted()
    whole = Training(MeasuringInterval(budget, every), 0.4)
    expected = continued(whole, script)
    head = Training(MeasuringInterval(budget, every), 0.4)
    before = continued(head, script[:cut])
    state = head.interval.state_dict()
    continued(head, script[cut:])  # does not change the state that was saved
    resumed = Training(MeasuringInterval(budget, every), 0.4)
    resumed.interval.load_state_dict(state)
    sizes = Training(MeasuringInterval(budget, every), 0.4)
    continued(sizes, script[:cut])
    resumed.batch_size, resumed.seconds = sizes.batch_size, sizes.seconds
    assert expected == before + continued(resumed, script[cut:])


def test_under_another_setting_a_resumed_run_measures_its_first_step():
    old = Training(MeasuringInterval(0.05), 0.6)
    old.run(TIMING + 6)
    assert not old.interval.due
    new = MeasuringInterval(0.2)
    new.load_state_dict(old.interval.state_dict())
    assert new.due
    training = Training(new, 0.6)
    training.run(1)
    assert "adds 60% to a step, the batch rests, budget=0.2" in new.reason


# policies that need no statistics


@pytest.mark.parametrize("policy", [bb.Fixed(48), bb.Schedule("48, 96 from 4 steps")])
def test_a_policy_that_needs_no_statistics_decides_without(policy):
    controller = bb.Controller(policy, 48, smoothing="4 steps", dead_band=0.1)
    for steps in range(1, 9):
        now = TrainingState(48, 48, samples=48 * steps, steps=steps)
        decision = controller.next(None, now)
        assert policy.decide(None, now) == decision


def test_one_that_needs_them_is_not_asked_without():
    now = TrainingState(48, 48)
    for policy in (bb.SimiGrad(), bb.Shadow(bb.NoiseScale())):
        with pytest.raises(bb.errors.SettingError, match="needs the statistics of the step"):
            bb.Controller(policy, 48).next(None, now)
    with pytest.raises(bb.errors.SettingError, match="needs now="):
        bb.Controller(bb.Fixed(48), 48).next(None)


def test_a_shadow_needs_what_its_policy_needs():
    assert not bb.Controller(bb.Shadow(bb.Fixed(8)), 48).needs.statistics
    assert bb.Controller(bb.Shadow(bb.SimiGrad()), 48).needs.statistics
    now = TrainingState(48, 48)
    assert 8 == bb.Controller(bb.Shadow(bb.Fixed(8)), 48).next(None, now).advice


def test_each_step_counts_for_one_that_needs_none():
    controller = bb.Controller(bb.Schedule("32, 64 from 1 steps"), 32, decide_every=3)
    step = GradientStatistics(1.0, 576.0, samples=32, micro_batches=4)
    reasons = []
    for number in range(1, 7):
        now = TrainingState(32, 32, samples=32 * number, steps=number)
        reasons.append(controller.next(step if number % 2 else None, now).reason)
    between = "held: decides every 3 steps"
    asked = "schedule: 64 from 1 steps"
    assert [between, between, asked] * 2 == reasons
