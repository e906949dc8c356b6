"""The meter against gradients by hand, of known distributions, and of nanoGNS's published GPT.

docs/known-answers.md lists the numbers. Tolerances of random numbers are four standard errors.
"""

import math
from itertools import islice
from statistics import fmean, stdev

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch.gradients import SingleProcessSource
from bigbatch.gradients.groups.contributions import SIGNS, Projection, SignPool
from bigbatch.optim.functional import ratio
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.second_moment import GradientMoments
from real_data import FOLDER, needs
from studies.synthetic_gradients import Elliptical, measure_step, read_images, recorded_stages

torch.set_num_threads(1)  # small tensors: a second thread only waits


def measured(gradients, sizes, loss="weighted"):
    """What a meter reads of micro-batches with these mean gradients."""
    weight = nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    with GradientMeter([weight], loss=loss) as meter:
        for gradient, size in zip(gradients, sizes, strict=True):
            share = 1.0 if loss == "mean" else size / sum(sizes)
            torch.dot(weight, torch.tensor(gradient).double()).mul(share).backward()
        return meter.read(sizes)


def test_four_corners_of_a_square():
    # McCandlish et al. 2018 (1812.06162), appendix A.1: (8/3) / (1/3)
    square = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    assert pytest.approx(8.0) == measured(square, [4] * 4).noise_scale


def test_unequal_sizes_by_arithmetic():
    unequal = measured(((1.0,), (3.0,), (3.0,)), [8, 4, 4])
    assert pytest.approx((8 + 36 + 36 - 16 * 4) / 2) == unequal.grad_variance
    mean = measured(((1.0,), (3.0,)), [2, 6], "mean")
    assert pytest.approx((10 - 2 * 4) / ((1 - 1 / 2) * (1 / 2 + 1 / 6))) == mean.grad_variance


def isotropic(elements, scale, seed=0):
    """Normal gradients with |mu| = 1, B_simple = `scale` and equal variances."""
    mean = torch.full((elements,), elements**-0.5)
    variances = torch.full((elements,), scale / elements)
    return Elliptical("normal", mean, variances, None, torch.Generator().manual_seed(seed))


def steps_of(population, sizes, trials, **options):
    with GradientMeter(population.parameters(), **options) as meter:
        return [measure_step(meter, population, sizes) for _ in range(trials)]


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [[16] * 8, [4, 8, 12, 16, 16, 16, 24, 32]])
def test_noise_and_signal_of_normal_gradients(sizes):
    # var noise = 2 tr(Sigma^2) / 7; var signal = 2 tr(Sigma^2) / N^2 + 4 mu Sigma mu / N + ...
    steps = steps_of(isotropic(2000, 500), sizes, 400)
    assert pytest.approx(500, abs=1.2) == fmean(step.grad_variance for step in steps)
    assert pytest.approx(1.0, abs=0.032) == fmean(step.grad_sqnorm for step in steps)


@pytest.mark.thorough
@pytest.mark.parametrize(("half", "expected"), [(1, 1 / 9), (4, 1 / 3), (16, 2 / 3)])
def test_the_cosine_of_half_batches(half, expected):
    # 1 / (1 + 2 B_n / B); .007 a step
    steps = steps_of(isotropic(20_000, 8), [half, half], 200, half_batch_cosine=True)
    assert pytest.approx(expected, abs=0.002) == fmean(step.half_batch_cosine for step in steps)


@pytest.mark.thorough
def test_the_similarity_of_all_pairs():
    steps = steps_of(isotropic(20_000, 8), [1] * 8, 200)
    assert pytest.approx(1 / 3, abs=0.002) == fmean(step.similarity for step in steps)


@pytest.mark.thorough
@pytest.mark.parametrize(("level", "tolerance"), [(0.5, 0.1), (0.9, 0.06)])
def test_intervals_contain_the_truth_as_often_as_they_say(level, tolerance):
    population = isotropic(100, 64)
    truth = population.similarity(64)
    ends = [
        step.similarity_interval for step in steps_of(population, [8] * 8, 400, confidence=level)
    ]
    assert pytest.approx(level, abs=tolerance) == fmean(low <= truth <= high for low, high in ends)


@pytest.mark.thorough
def test_the_gsnr_of_pure_noise():
    # E F(1, 7) / 7 = 1 / (k - 3); 400,000 elements of deviation .4
    generator, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(400_000))
    source, moments = SingleProcessSource([weight], explicit=True), GradientMoments()
    source.subscribe(moments)
    for _ in range(8):
        with source.micro_batch():
            torch.dot(weight, torch.randn(len(weight), generator=generator)).backward()
    (total,), (m2,) = moments.sums_and_m2s([weight], source.sums_of)
    mean = ratio(total, m2, moments.weight).mean()
    assert pytest.approx(0.2, abs=0.0025) == float(mean)


@pytest.mark.thorough
def test_projections_have_the_mean_and_variance_of_random_signs():
    # docs/theory.md (13): g^2 = 16 and 2 / m (16^2 - 16) of 256 independent ones
    pool, gradient = SignPool(), torch.ones(16, 1)
    signs = [pool.signs(16, at, gradient.device, gradient.dtype) for at in range(4093)]
    values = [float(Projection(one).of(gradient).square().sum()) / SIGNS for one in signs]
    assert pytest.approx(16, abs=2) == fmean(values)
    assert pytest.approx(60, abs=28) == stdev(values) ** 2


@pytest.mark.thorough
def test_the_noise_of_projected_groups_is_unbiased():
    # docs/theory.md (13); 300 draws of signs of deviation at most .5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        x, y = torch.randn(64, 64), torch.randint(10, (64,))

    def noise(draws, **options):
        values = []
        with GradientMeter(model, groups=8, **options) as meter:
            for _ in range(draws):
                model.zero_grad()
                cross_entropy(model(x), y).backward()
                values.append(meter.read([len(y)]).grad_variance)
        return fmean(values)

    assert pytest.approx(noise(1, per_layer=True), rel=0.115) == noise(300)


@pytest.mark.release
@needs("fashion-mnist")
@pytest.mark.parametrize("seed", [0, 1])
def test_the_noise_of_a_recorded_network(seed):
    # mean and covariance of 10,000 recorded gradients of a CNN, after 0 and 100 steps
    images = read_images(FOLDER / "fashion-mnist")
    for population in islice(recorded_stages(*images, seed), 2):
        steps = steps_of(population, [16] * 8, 300)
        for name in ("grad_variance", "grad_sqnorm"):
            values = [getattr(step, name) for step in steps]
            error = 4 * stdev(values) / math.sqrt(len(values))
            assert pytest.approx(getattr(population, name), abs=error) == fmean(values)
