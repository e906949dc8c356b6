"""Settings of a recipe, and the controller that they make."""

import pytest

from bigbatch import Fixed, GradientStatistics, NoiseScale, Schedule, SimiGrad
from bigbatch.experiments.build_optimizer import build_controller
from bigbatch.experiments.digits import DIGITS


def controller(**changes):
    return build_controller(DIGITS.settings().changed(changes))


@pytest.mark.parametrize(
    ("text", "policy", "start"),
    [
        ("simigrad", SimiGrad(0.3, 16, 512), 32),
        ("simigrad:0.4", SimiGrad(0.4, 16, 512), 32),
        ("simigrad:max_batch=2048", SimiGrad(0.3, 16, 2048), 32),
        ("noise-scale", NoiseScale(1.0, 16, 512), 32),
        ("fixed", Fixed(32), 32),
        ("fixed:1024", Fixed(1024), 1024),
        ("schedule:64, x2 every 5 epochs", Schedule("64, x2 every 5 epochs"), 64),
    ],
)
def test_a_text_has_the_recipes_values_for_what_it_does_not_say(text, policy, start):
    found = controller(policy=text, smoothing=1000.0)
    assert policy == found.policy
    assert start == found.decision.batch_size
    assert 32 == found.base_batch


def test_smoothing_and_dead_band_reach_the_controller():
    noise = GradientStatistics(1.0, 40.0, samples=32, micro_batches=4)
    found = controller(policy="noise-scale", smoothing=50.0, dead_band=0.5)
    assert "held: inside the dead band of 0.5" in found.next(noise).reason
    smoothed = found.next(GradientStatistics(1.0, 320.0, samples=32, micro_batches=4))
    assert 32 < smoothed.batch_size < 320


def test_the_arms_of_the_digits_can_be_built():
    for changes in DIGITS.arms.values():
        assert controller(**changes).decision.batch_size >= 16
