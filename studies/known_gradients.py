"""Known answers of the meter: gradients by hand, of known distributions, and of a recorded CNN."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bigbatch.gradients import SingleProcessSource
from bigbatch.gradients.groups.contributions import SIGNS, Projection, SignPool
from bigbatch.optim.functional import ratio
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.statistics.second_moment import GradientMoments
from studies.known_answer import EXACT, KnownAnswer
from studies.synthetic_gradients import (
    Elliptical,
    Population,
    measure_step,
    read_images,
    recorded_stages,
)

_A1 = "McCandlish et al. 2018 (1812.06162), appendix A.1"
_THEORY = "trace and mean of the distribution drawn from"


def run(seed: int, data: Path | None) -> Iterator[KnownAnswer]:
    """Statistics of gradients whose statistics are known."""
    yield from _by_hand()
    yield from _normal(seed)
    yield from _cosines(seed)
    yield from _intervals(seed)
    yield _pure_noise_gsnr(seed)
    yield from _projections(seed)
    yield from _recorded(seed, data)


def _measured(
    gradients: Sequence[Sequence[float]],
    sizes: Sequence[int],
    loss: Literal["weighted", "mean"] = "weighted",
) -> GradientStatistics:
    """What a meter reads of micro-batches with these mean gradients."""
    weight = nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    with GradientMeter([weight], loss=loss) as meter:
        for gradient, size in zip(gradients, sizes, strict=True):
            share = 1.0 if loss == "mean" else size / sum(sizes)
            torch.dot(weight, torch.tensor(gradient).double()).mul(share).backward()  # type: ignore[no-untyped-call]
        statistics = meter.read(sizes)
    assert statistics is not None
    return statistics


def _by_hand() -> Iterator[KnownAnswer]:
    square = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    measured = _measured(square, [4] * 4).noise_scale
    what, source = "B_simple of four corners of a square, 4 samples each", f"{_A1}: (8/3) / (1/3)"
    yield KnownAnswer(what, source, 8.0, measured, 8 * EXACT, "rounding")
    unequal = _measured(((1.0,), (3.0,), (3.0,)), [8, 4, 4])
    source = "arithmetic: (8 + 36 + 36 - 16 x 4) / 2"
    yield KnownAnswer("tr Sigma of 1, 3, 3 with sizes 8, 4, 4", source, 8.0, *_near(unequal, 8.0))
    mean = _measured(((1.0,), (3.0,)), [2, 6], "mean")
    source = "arithmetic: (10 - 2 x 4) / ((1 - 1/2) (1/2 + 1/6))"
    yield KnownAnswer("tr Sigma of mean losses 1, 3, sizes 2, 6", source, 6.0, *_near(mean, 6.0))


def _near(statistics: GradientStatistics, expected: float) -> tuple[float, float, str]:
    return statistics.grad_variance, expected * EXACT, "rounding"


def _isotropic(elements: int, scale: float, seed: int) -> Elliptical:
    """Normal gradients with |mu| = 1, B_simple = `scale` and equal variances."""
    mean = torch.full((elements,), elements**-0.5)
    variances = torch.full((elements,), scale / elements)
    generator = torch.Generator().manual_seed(seed)
    return Elliptical("normal", mean, variances, None, generator)


def _steps(
    population: Population, sizes: Sequence[int], trials: int, *, cosine: bool = False
) -> list[GradientStatistics]:
    with GradientMeter(population.parameters(), half_batch_cosine=cosine) as meter:
        return [measure_step(meter, population, sizes) for _ in range(trials)]


def _normal(seed: int) -> Iterator[KnownAnswer]:
    for kind, sizes in (("16", [16] * 8), ("4 to 32", [4, 8, 12, 16, 16, 16, 24, 32])):
        steps = _steps(_isotropic(2000, 500, seed), sizes, 400)
        noise = fmean(step.grad_variance for step in steps)
        signal = fmean(step.grad_sqnorm for step in steps)
        reason = "4 standard errors of 400 steps"
        name = f"of 2,000 normal elements, 8 micro-batches of {kind}"
        # var noise = 2 tr(Sigma^2) / 7; var signal = 2 tr(Sigma^2) / N^2 + 4 mu Sigma mu / N + ...
        yield KnownAnswer(f"tr Sigma {name}", _THEORY, 500, noise, 1.2, reason)
        yield KnownAnswer(f"mu^2 {name}", _THEORY, 1.0, signal, 0.032, reason)


def _cosines(seed: int) -> Iterator[KnownAnswer]:
    reason = "4 standard errors of 200 steps, .007 each"
    for half, expected in ((1, 1 / 9), (4, 1 / 3), (16, 2 / 3)):
        steps = _steps(_isotropic(20_000, 8, seed), [half, half], 200, cosine=True)
        cosine = fmean(step.half_batch_cosine or math.nan for step in steps)
        what, source = f"cosine of half-batches of {half}, B_simple = 8", "1 / (1 + 2 B_n / B)"
        yield KnownAnswer(what, source, expected, cosine, 0.002, reason)
    phi = fmean(step.similarity for step in _steps(_isotropic(20_000, 8, seed), [1] * 8, 200))
    yield KnownAnswer("similarity of all pairs, B = 8", source, 1 / 3, phi, 0.002, reason)


def _intervals(seed: int) -> Iterator[KnownAnswer]:
    population, sizes, trials = _isotropic(100, 64, seed), [8] * 8, 400
    truth = population.similarity(sum(sizes))
    for level, tolerance in ((0.5, 0.1), (0.9, 0.06)):
        with GradientMeter(population.parameters(), confidence=level) as meter:
            steps = [measure_step(meter, population, sizes) for _ in range(trials)]
        ends = [step.similarity_interval or (math.nan, math.nan) for step in steps]
        covered = fmean(low <= truth <= high for low, high in ends)
        what = f"share of {level:g} intervals that contain the truth, k = 8"
        reason = "4 binomial standard errors of 400"
        yield KnownAnswer(what, "the nominal level", level, covered, tolerance, reason)


def _pure_noise_gsnr(seed: int) -> KnownAnswer:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(400_000))
    source, moments = SingleProcessSource([weight], explicit=True), GradientMoments()
    source.subscribe(moments)
    for _ in range(8):
        with source.micro_batch():
            torch.dot(weight, torch.randn(len(weight), generator=generator)).backward()  # type: ignore[no-untyped-call]
    mean = float(ratio(*moments.sum_and_m2(weight), moments.weight).mean())
    what, source_of_number = "mean GSNR of pure noise, k = 8", "E F(1, 7) / 7 = 1 / (k - 3)"
    reason = "4 standard errors of 400,000 elements, .4 each"
    return KnownAnswer(what, source_of_number, 0.2, mean, 0.0025, reason)


def _projections(seed: int) -> Iterator[KnownAnswer]:
    pool, gradient = SignPool(), torch.ones(16, 1)
    values = []
    for start in range(4093):
        signs = pool.signs(16, start, gradient.device, gradient.dtype)
        values.append(float(Projection(signs).of(gradient).square().sum()) / SIGNS)
    source = "2 / m (16^2 - 16), docs/theory.md (13)"
    reason = "4 standard errors of 256 independent ones"
    what = "of (S g)^2 / 8, g = 16 rows of ones"
    yield KnownAnswer(
        f"mean {what}", "g^2, random signs: docs/theory.md (13)", 16, fmean(values), 2.0, reason
    )
    variance = stdev(values) ** 2
    yield KnownAnswer(f"variance {what}", source, 60, variance, 28, reason)
    yield _projected_noise(seed)


def _projected_noise(seed: int) -> KnownAnswer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        x, y = torch.randn(64, 64), torch.randint(10, (64,))
    values = []
    for exact, count in ((True, 1), (False, 300)):
        with GradientMeter(model, groups=8, per_layer=exact) as meter:
            values.append([_one_backward(model, meter, x, y) for _ in range(count)])
    what = "noise of 8 groups by projections / by their gradients"
    reason = "4 standard errors of 300 draws of signs, at most .5 each"
    measured = fmean(values[1]) / values[0][0]
    return KnownAnswer(what, "unbiased: docs/theory.md (13)", 1.0, measured, 0.115, reason)


def _one_backward(model: nn.Module, meter: GradientMeter, x: Tensor, y: Tensor) -> float:
    model.zero_grad()
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    statistics = meter.read([len(y)])
    assert statistics is not None
    return statistics.grad_variance


def _recorded(seed: int, data: Path | None) -> Iterator[KnownAnswer]:
    source = "mean and covariance of 10,000 recorded gradients"
    folder = None if data is None else data / "fashion-mnist"
    reason = "4 standard errors of 300 steps"
    names = [f"of a CNN after {steps} steps" for steps in (0, 100)]
    if folder is None or not folder.is_dir():
        missing = "no --data" if folder is None else f"there is no {folder}"
        for name in names:
            what = f"tr Sigma {name}"
            yield KnownAnswer(what, source, math.nan, math.nan, 0, reason, skipped=missing)
        return
    for name, population in zip(
        names, islice(recorded_stages(*read_images(folder), seed), 2), strict=True
    ):
        steps = _steps(population, [16] * 8, 300)
        for what, expected, values in (
            ("tr Sigma", population.grad_variance, [step.grad_variance for step in steps]),
            ("mu^2", population.grad_sqnorm, [step.grad_sqnorm for step in steps]),
        ):
            error = 4 * stdev(values) / math.sqrt(len(values))
            yield KnownAnswer(f"{what} {name}", source, expected, fmean(values), error, reason)
        del population
