"""Policies, schedules and costs of a batch size against published and analytic numbers.

docs/known-answers.md lists them. No expected number shares code with the library.
"""

from statistics import fmean

import pytest

from bigbatch.log.replay import Trace, Trajectory
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller
from bigbatch.policies.goodput import Goodput
from bigbatch.policies.lr_scaling import resolve_scaling
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import NoiseScale, SimiGrad, TrainingState
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics

SCALE = 1000  # B_simple that the policies see, in samples
SAMPLES = 720_720  # of a log
ROUNDING = 1e-9


def statistics(batch_size, scale=SCALE):
    """Exact statistics of a step: signal 1, noise B_simple."""
    return GradientStatistics(1.0, scale, samples=batch_size, micro_batches=8)


def settled(policy, batch_size):
    """The mean of the last 20 of 200 batch sizes, each decided by exact statistics of its own."""
    controller = Controller(policy, batch_size, smoothing="1 steps")
    sizes = [controller.next(statistics(controller.decision.batch_size)) for _ in range(200)]
    return fmean(decision.batch_size for decision in sizes[-20:])


@pytest.mark.parametrize(
    ("target", "multiple"), [(0.1, 2 / 9), (0.2, 1 / 2), (1 / 3, 1.0), (0.5, 2.0), (0.75, 6.0)]
)
def test_simigrad_settles_at_its_multiple_of_the_noise_scale(target, multiple):
    # 2 phi / (1 - phi), from E cosine = 1 / (1 + 2 B_n / B); the rule moves by 10 %
    assert pytest.approx(multiple, rel=0.1) == settled(SimiGrad(target=target), 64) / SCALE


def test_byrds_test_with_the_true_norm_settles_at_its_multiple():
    policy = NoiseScale(multiple=1 / 0.5**2)  # 1 / theta^2: Byrd et al. 2012
    assert pytest.approx(4.0, abs=0.001) == settled(policy, 8) / SCALE  # whole samples


@pytest.mark.parametrize(
    ("batch_size", "similarity", "steps", "expected"),
    [
        (128, 0.0, 8, 269),  # 140 154 169 185 203 223 245 269
        (128, 1.0, 8, 52),  # 115 103 92 82 73 65 58 52
        (1, 0.0, 12, 13),
        (300, 0.4, 5, 300),
    ],
)
def test_simigrads_published_rule(batch_size, similarity, steps, expected):
    # SimiGrad's published code, deepspeed_light.py
    for _ in range(steps):
        batch_size = SimiGrad(target=0.4).next_batch(similarity, batch_size)
    assert expected == batch_size


def test_simigrads_learning_rate_factor():
    factor = resolve_scaling("sqrt", 128)
    assert pytest.approx(4.0, rel=ROUNDING) == factor(2048, 128, None)  # deepspeed_light.py


@pytest.mark.parametrize(("scale", "gain"), [(0.0, 1.0), (64.0, 2 / 1.25), (1e12, 4.0)])
def test_adascales_gain(scale, gain):
    # Johnson et al. 2020 (2007.05105), equation 4: 256 samples over 64
    assert pytest.approx(gain, rel=1e-8) == statistics(256, scale).adascale_gain(64)


def test_the_generalization_ratio_is_published():
    # Liu et al. 2020 (2001.07384), summed: 1 / (1 + B_n / n) at n = 3 B_n
    assert pytest.approx(0.75, rel=ROUNDING) == statistics(3000).generalization_ratio()


@pytest.mark.parametrize(
    ("multiple", "steps", "samples"), [(0.5, 3.0, 1.5), (1.0, 2.0, 2.0), (4.0, 1.25, 5.0)]
)
def test_steps_and_samples_of_a_fixed_batch(multiple, steps, samples):
    # McCandlish et al. 2018 (1812.06162): (S / S_min - 1)(E / E_min - 1) = 1
    batch_size = int(multiple * SCALE)
    row = {"samples": SAMPLES, "grad_sqnorm": 1.0, "grad_variance": SCALE, "micro_batches": 8}
    count = int(SAMPLES / batch_size)
    ends = [batch_size * (step + 1) for step in range(count)]
    progress = Trajectory("fixed", ends, [batch_size] * count).progress(Trace([row]))
    seen = count * batch_size / progress  # samples for one unit of progress
    assert pytest.approx((steps, samples), rel=1e-6) == (seen / batch_size, seen / SCALE)


def test_goodputs_batch_is_the_root_of_overhead_times_noise_scale():
    # the best goodput of Pollux (OSDI 2021): sqrt(B_0 B_n)
    decision = Goodput(overhead=400).decide(statistics(64), TrainingState(64, 64))
    assert pytest.approx(400_000**0.5, abs=0.5) == decision.batch_size


def test_a_schedule_and_a_plan_by_arithmetic():
    controller = Controller(Schedule("32, x2 every 8K samples up to 512"), 32)
    state = TrainingState(32, 32, samples=20_000)
    assert 32 * 2 * 2 == controller.next(None, state).batch_size
    assert 500 == BatchPlan.fit(6000, 4, max_micro=512).micro  # 6000 / (4 x 3) <= 512


def test_an_average_of_three_steps_by_arithmetic():
    average = NoiseAverage(1 / 0.6931471805599453, "steps")  # a weight of 1/2
    for noise in (8.0, 2.0, 5.0):
        smooth = average.update(GradientStatistics(1.0, noise, samples=64, micro_batches=8))
    assert pytest.approx((8 / 4 + 2 / 2 + 5) / (1 / 4 + 1 / 2 + 1)) == smooth.grad_variance
