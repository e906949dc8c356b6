"""BranchTest: the policy inside sees B_crit as its noise scale."""

import math
from dataclasses import replace

import pytest

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.statistics.confidence import Interval, log_ratio
from stateful_policy import Patient

NOW = bb.TrainingState(128, 128, 128)
STEP = bb.GradientStatistics(1.0, 600.0, samples=128, micro_batches=4)


def with_result(policy, critical, interval, noise_scale=500.0, position=(9000, 90, 1), **settings):
    tested = bb.BranchTest(policy, loss_of=len, **settings)
    tested.take(critical, interval, noise_scale=noise_scale, spent=100, position=position)
    return tested


def test_before_the_first_test_the_policy_decides_alone():
    policy = bb.NoiseScale()
    alone, decision = (p.decide(STEP, NOW) for p in (policy, bb.BranchTest(policy, loss_of=len)))
    assert replace(alone, reason=f"{alone.reason}; no branch test yet") == decision


def test_a_noise_scale_becomes_the_critical_batch():
    policy = with_result(bb.NoiseScale(), 2000.0, (1500.0, 2500.0))
    assert 4.0 == policy.ratio
    decision = policy.decide(STEP, NOW)
    assert 2400 == decision.batch_size
    assert "noise x 4 by the branch test at 9000 samples" in decision.reason
    assert (
        2400
        == with_result(bb.Shadow(bb.NoiseScale()), 2e3, (1500.0, 2500.0)).decide(STEP, NOW).advice
    )


def test_an_interval_is_corrected_with_the_noise():
    x = log_ratio(1.0, 600.0, 128)
    seen = []

    class Sees:
        def decide(self, statistics, now):
            seen.append(statistics)
            return bb.Decision(8, "seen")

    step = bb.GradientStatistics(
        1.0, 600.0, samples=128, micro_batches=4, interval=Interval(-0.1, x, 0.9, "step")
    )
    with_result(Sees(), 2000.0, (1500.0, 2500.0)).decide(step, NOW)
    assert pytest.approx(log_ratio(1.0, 2400.0, 128)) == seen[0].interval.high
    assert pytest.approx((2400, math.inf)) == seen[0].noise_scale_interval


@pytest.mark.parametrize(
    ("critical", "interval", "noise_scale", "ratio"),
    [
        (2000.0, (1500.0, 2500.0), 500.0, 4.0),
        (math.inf, (1500.0, math.inf), 500.0, 3.0),  # as far as the bound demands
        (math.inf, (250.0, math.inf), 500.0, 1.0),
        (0.0, (0.0, 250.0), 500.0, 0.5),
        (math.nan, (0.0, math.inf), 500.0, 1.0),
        (2000.0, (1500.0, 2500.0), math.inf, 1.0),
        (2000.0, (1500.0, 2500.0), math.nan, 1.0),
    ],
)
def test_a_test_without_both_ends_moves_the_ratio_only_as_far_as_it_must(
    critical, interval, noise_scale, ratio
):
    assert ratio == with_result(bb.NoiseScale(), critical, interval, noise_scale).ratio


@pytest.mark.parametrize(
    ("every", "position", "due"),
    [
        ("20 %", (10_799, 900, 5), False),
        ("20%", (10_800, 91, 1), True),
        ("1.5 %", (9135, 91, 1), True),
        ("4K samples", (12_999, 900, 5), False),
        ("4K samples", (13_000, 91, 1), True),
        ("100 steps", (10**6, 189, 9), False),
        ("100 steps", (9001, 190, 1), True),
        ("2 epochs", (10**6, 900, 2), False),
        ("2 epochs", (9001, 91, 3), True),
    ],
)
def test_the_next_test_is_due_after_an_amount_or_a_growth(every, position, due):
    policy = with_result(bb.NoiseScale(), 2e3, (1500.0, 2500.0), every=every)
    assert due == policy.is_due(*position)
    assert bb.BranchTest(bb.NoiseScale(), loss_of=len, every=every).is_due(0, 0, 0)


def test_all_tests_together_may_spend_a_share():
    policy = with_result(bb.NoiseScale(), 2e3, (1500.0, 2500.0))
    assert 0.05 * 9000 - 100 == policy.allowance(9000)


def test_the_state_is_all_that_a_decision_depends_on():
    policy = with_result(bb.NoiseScale(), 2e3, (1500.0, 2500.0))
    resumed = bb.BranchTest(bb.NoiseScale(), loss_of=len)
    resumed.load_state_dict(policy.state_dict())
    assert policy.state_dict() == resumed.state_dict()
    assert policy.decide(STEP, NOW) == resumed.decide(STEP, NOW)
    controller = bb.Controller(policy, 128, smoothing="4K samples")
    assert policy.state_dict() == controller.state_dict()["policy"]


def test_dead_band_and_confidence_work_unless_the_policy_inside_counts():
    policy = with_result(bb.SimiGrad(0.2), 2e3, (1500.0, 2500.0))
    controller = bb.Controller(policy, 128, dead_band=0.15, confidence=0.9, smoothing="500 samples")
    before = policy.state_dict()
    controller.next(STEP)
    assert before == policy.state_dict()
    same = with_result(bb.SimiGrad(0.2), 600.0, (500.0, 700.0), 600.0)
    controller = bb.Controller(same, 140, dead_band=2.0, smoothing=None)
    assert "held: inside the dead band" in controller.next(STEP).reason
    counting = bb.BranchTest(Patient(), loss_of=len)
    assert {"decisions": 0} == counting.state_dict()["policy"]
    with pytest.raises(SettingError, match="leave them out"):
        bb.Controller(counting, 128, dead_band=0.15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": bb.Fixed(8)}, "Fixed decides without statistics"),
        ({"policy": bb.NoiseScale}, r"pass NoiseScale\(\.\.\.\)"),
        ({"every": "often"}, "every='often' must be text \"20 %\" or"),
        ({"every": "0 %"}, "every="),
        ({"every": "2B tokens"}, "every="),
        ({"repeats": 1}, "repeats=1"),
        ({"share": 0}, "share=0"),
        ({"loss_of": 3}, "loss_of=3 must be a function"),
    ],
    ids=str,
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        bb.BranchTest(**{"policy": bb.NoiseScale(), "loss_of": len, **settings})
