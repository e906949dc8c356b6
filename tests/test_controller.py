"""The one stateful object of the decision."""

import json

import pytest

import bigbatch as bb
from bigbatch import BatchPlan, Controller, Decision, Fixed, GradientNoise, Progress, SimiGrad
from bigbatch.errors import SettingError


def low(samples=64):
    return GradientNoise(0.0, 1.0, samples, micro_batches=4)


def high(samples=64):
    return GradientNoise(1.0, 0.0, samples, micro_batches=4)


class HoldUntil:
    """DESIGN section 3, letter for letter."""

    def decide(self, noise: bb.GradientNoise, now: bb.Progress) -> bb.Decision:
        return bb.Decision(
            batch_size=now.target if now.samples < 10_000 else 4096,
            reason="warm-up",
            lr_factor=1.0,
        )


class Listens:
    """A policy that keeps what it was told."""

    def __init__(self):
        self.heard = []

    def decide(self, noise, now):
        self.heard.append((noise, now))
        return Decision(now.target + 1, "one more", lr_factor=0.5)


def test_it_starts_where_it_is_told_and_asks_after_every_step():
    controller = Controller(SimiGrad(target=0.2), batch_size=128)
    assert Decision(128, "start") == controller.decision
    assert 140 == controller.next(low(128)).batch_size
    assert 140 == controller.decision.batch_size
    assert 126 == controller.next(high(140)).batch_size


def test_the_target_is_remembered_as_decided_not_as_cut():
    controller, wanted, cut = Controller(SimiGrad(target=0.2), batch_size=24), [], []
    for _ in range(6):
        plan = BatchPlan.fit(controller.decision.batch_size, ranks=8, max_micro=64)
        wanted.append(controller.decision.batch_size)
        cut.append(plan.batch_size)
        controller.next(low(samples=plan.batch_size))
    assert [24, 26, 28, 30, 33, 36] == wanted
    assert [24, 24, 24, 32, 32, 32] == cut  # fed back, 24 would stay 24 for ever


def test_bounds_clamp_what_is_remembered():
    controller = Controller(SimiGrad(target=0.2), 128, min_batch=100, max_batch=300)
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
    expected = Progress(target=129, batch_size=96, base_batch=32, samples=192, steps=2)
    assert [(noise, expected)] == policy.heard[1:]


def test_a_policy_hears_the_progress_that_a_loop_states_with_the_target_filled_in():
    policy = Listens()
    stated = Progress(7, 96, 32, samples=10**6, steps=5, epoch=3, ranks=2, lr=(0.1,), seconds=1.5)
    Controller(policy, batch_size=128).next(low(), stated)
    told = policy.heard[0][1]
    assert (128, 10**6, 5, 3, 2) == (told.target, told.samples, told.steps, told.epoch, told.ranks)
    assert (96, 32, (0.1,), 1.5) == (told.batch_size, told.base_batch, told.lr, told.seconds)


def test_the_base_batch_is_where_it_starts_unless_stated():
    assert 128 == Controller(Fixed(8), 128).base_batch
    assert 32 == Controller(Fixed(8), 128, 32).base_batch


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


def test_a_saved_controller_goes_on_as_if_it_had_never_stopped():
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
    controller.load_state_dict(Controller(SimiGrad(target=0.2), 4096).state_dict())
    assert 256 == controller.decision.batch_size
