"""Settings of a recipe, and the controller that they make."""

import pytest

from bigbatch import Fixed, GradientStatistics, NoiseScale, Schedule, SimiGrad
from bigbatch_recipes.build_loop import build_controller
from bigbatch_recipes.digits import DIGITS


def controller(**changes):
    return build_controller(DIGITS.settings().with_changes(changes))


@pytest.mark.parametrize(
    ("changes", "policy", "start"),
    [
        ({"policy": "simigrad"}, SimiGrad(0.3, 16, 512), 32),
        ({"target": 0.4, "grow": 1.5, "shrink": 0.8}, SimiGrad(0.4, 16, 512, 1.5, 0.8), 32),
        ({"max_batch": 2048}, SimiGrad(0.3, 16, 2048), 32),
        ({"policy": "noise-scale", "multiple": 2.0}, NoiseScale(2.0, 16, 512), 32),
        ({"policy": "fixed"}, Fixed(32), 32),
        ({"policy": "fixed", "batch_size": 1024}, Fixed(1024), 1024),
        (
            {"policy": "schedule", "batch_schedule": "64, x2 every 5 epochs"},
            Schedule("64, x2 every 5 epochs"),
            64,
        ),
    ],
)
def test_a_policy_has_the_values_of_the_settings(changes, policy, start):
    found = controller(**changes, smoothing="1000 samples")
    assert policy == found.policy
    assert start == found.decision.batch_size
    assert 32 == found.base_batch


def test_smoothing_and_dead_band_reach_the_controller():
    noise = GradientStatistics(1.0, 40.0, samples=32, micro_batches=4)
    found = controller(policy="noise-scale", smoothing="50 samples", dead_band=0.5)
    assert "held: inside the dead band of 0.5" in found.next(noise).reason
    smoothed = found.next(GradientStatistics(1.0, 320.0, samples=32, micro_batches=4))
    assert 32 < smoothed.batch_size < 320


def test_the_arms_of_the_digits_can_be_built():
    for changes in DIGITS.arms.values():
        assert controller(**changes).decision.batch_size >= 16
