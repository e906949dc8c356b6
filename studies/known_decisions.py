"""Known answers of policies, schedules and learning-rate scaling, all without chance."""

from collections.abc import Iterator
from statistics import fmean

from bigbatch.log.replay import Trace, Trajectory
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller
from bigbatch.policies.goodput import Goodput
from bigbatch.policies.lr_scaling import square_root
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import NoiseScale, NormTest, Policy, SimiGrad, TrainingState
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics
from studies.known_answer import EXACT, KnownAnswer

_SCALE = 1000  # B_simple that the policies see, in samples

_MULTIPLES = {0.1: 2 / 9, 0.2: 1 / 2, 1 / 3: 1.0, 0.5: 2.0, 0.75: 6.0}  # of B_simple, by similarity
_MCCANDLISH = "McCandlish et al. 2018 (1812.06162)"
_SIMIGRAD = "SimiGrad's published code, deepspeed_light.py"


def run() -> Iterator[KnownAnswer]:
    """Batch sizes where policies settle, rules step by step, costs of a batch size."""
    yield from _fixed_points()
    yield from _simigrad_rule()
    yield from _gains()
    yield from _costs()
    yield from _plans_and_averages()


def _statistics(batch_size: float, scale: float = _SCALE) -> GradientStatistics:
    """Exact statistics of a step: signal 1, noise B_simple."""
    return GradientStatistics(1.0, scale, samples=batch_size, micro_batches=8)


def _settled(policy: Policy, batch_size: int) -> float:
    """The mean of the last 20 of 200 batch sizes, each decided by exact statistics of its own."""
    controller = Controller(policy, batch_size, smoothing="1 steps")
    sizes = [controller.next(_statistics(controller.decision.batch_size)) for _ in range(200)]
    return fmean(decision.batch_size for decision in sizes[-20:])


def _fixed_points() -> Iterator[KnownAnswer]:
    reason = "the rule moves by 10 %"
    for target, multiple in _MULTIPLES.items():
        measured = _settled(SimiGrad(target=target), 64) / _SCALE
        what = f"batch / B_simple where SimiGrad({target:.3g}) settles"
        source = "2 phi / (1 - phi), from E cosine = 1 / (1 + 2 B_n / B)"
        yield KnownAnswer(what, source, multiple, measured, 0.1 * multiple, reason)
    for theta, multiple in ((0.5, 3.0), (0.8, 0.5625)):
        measured = _settled(NormTest(theta=theta), 8) / _SCALE
        what = f"batch / B_simple where NormTest({theta:g}) settles"
        source = "1 / theta^2 - 1: Byrd et al. 2012 with the batch's own norm"
        yield KnownAnswer(what, source, multiple, measured, 0.002, "whole samples")
    measured = _settled(NoiseScale(multiple=1 / 0.5**2), 64) / _SCALE
    source = "1 / theta^2: Byrd et al. 2012 with the true norm"
    what = "batch / B_simple where NoiseScale(1 / .5^2) settles"
    yield KnownAnswer(what, source, 4.0, measured, 0.001, "whole samples")


def _simigrad_rule() -> Iterator[KnownAnswer]:
    exact = "whole numbers"
    for first, similarity, steps, expected in (
        (128, 0.0, 8, 269),  # 140 154 169 185 203 223 245 269
        (128, 1.0, 8, 52),  # 115 103 92 82 73 65 58 52
        (1, 0.0, 12, 13),  # 2 3 4 5 6 7 8 9 10 11 12 13
        (300, 0.4, 5, 300),
    ):
        batch_size, policy = first, SimiGrad(target=0.4)
        for _ in range(steps):
            batch_size = policy.next_batch(similarity, batch_size)
        what = f"SimiGrad(.4) from {first}, {steps} similarities of {similarity:g}"
        yield KnownAnswer(what, _SIMIGRAD, expected, batch_size, 0, exact)
    measured = square_root(2048, 128)
    yield KnownAnswer("lr factor at 2048 for 128", _SIMIGRAD, 4.0, measured, EXACT, "rounding")


def _gains() -> Iterator[KnownAnswer]:
    source = "AdaScale, Johnson et al. 2020 (2007.05105), equation 4"
    for what, scale, expected in (
        ("without noise", 0.0, 1.0),
        ("with B_simple = 64", 64.0, 2 / 1.25),
        ("with noise alone", 1e12, 4.0),
    ):
        measured = _statistics(256, scale).adascale_gain(64)
        what = f"AdaScale's gain of 256 over 64 {what}"
        yield KnownAnswer(what, source, expected, measured, 1e-8, "noise of 1e12 for all noise")
    measured = _statistics(3000).generalization_ratio()
    source = "Liu et al. 2020 (2001.07384), summed: 1 / (1 + B_n / n)"
    yield KnownAnswer("generalization ratio, 3 B_n", source, 0.75, measured, EXACT, "rounding")


def _costs() -> Iterator[KnownAnswer]:
    source = f"{_MCCANDLISH}, (S / S_min - 1)(E / E_min - 1) = 1"
    reason = "rounding of a log"
    for multiple, steps, samples in ((0.5, 3.0, 1.5), (1.0, 2.0, 2.0), (4.0, 1.25, 5.0)):
        batch_size = int(multiple * _SCALE)
        seen = _SAMPLES / _progress(batch_size)  # for one unit of progress
        what = f"steps over the least possible, at {multiple:g} B_n"
        yield KnownAnswer(what, source, steps, seen / batch_size, 1e-6, reason)
        what = f"samples over the least possible, at {multiple:g} B_n"
        yield KnownAnswer(what, source, samples, seen / _SCALE, 1e-6, reason)
    decision = Goodput(overhead=400).decide(_statistics(64), TrainingState(64, 64))
    what = "batch of most progress per second, B_0 = 400, B_n = 1000"
    source = "sqrt(B_0 B_n): the best goodput of Pollux (OSDI 2021)"
    yield KnownAnswer(what, source, 400000**0.5, decision.batch_size, 0.5, "whole samples")


_SAMPLES = 720_720  # of a log


def _progress(batch_size: int) -> float:
    """Progress of a fixed batch size over a log of constant signal and noise."""
    rows = [{"samples": _SAMPLES, "grad_sqnorm": 1.0, "grad_variance": _SCALE, "micro_batches": 8}]
    steps = _SAMPLES / batch_size
    count = int(steps)
    ends = [batch_size * (step + 1) for step in range(count)]
    return Trajectory("fixed", ends, [batch_size] * count).progress(Trace(rows)) * steps / count


def _plans_and_averages() -> Iterator[KnownAnswer]:
    controller = Controller(Schedule("32, x2 every 8K samples up to 512"), 32)
    now = TrainingState(32, 32, samples=20_000)
    measured = controller.next(None, now).batch_size
    source = "arithmetic: 32 x 2 x 2"
    yield KnownAnswer("32, x2 every 8K samples, after 20K", source, 128, measured, 0, "exact")
    plan = BatchPlan.fit(6000, 4, max_micro=512)
    source = "arithmetic: least accumulation with 6000 / (4 x 3) <= 512"
    yield KnownAnswer("micro-batch of 6000 on 4 ranks", source, 500, plan.micro, 0, "exact")
    average = NoiseAverage(1 / 0.6931471805599453, "steps")  # a weight of 1/2
    for noise in (8.0, 2.0, 5.0):
        smooth = average.update(GradientStatistics(1.0, noise, samples=64, micro_batches=8))
    source = "arithmetic: (8/4 + 2/2 + 5) / (1/4 + 1/2 + 1)"
    what, noise = "average of 8, 2, 5 by 1/4, 1/2, 1", smooth.grad_variance
    yield KnownAnswer(what, source, 32 / 7, noise, EXACT, "rounding")
