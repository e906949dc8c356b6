"""Steps of optimizers and of the loop against published and analytic numbers.

docs/known-answers.md lists them. Tolerances of random numbers are four standard errors.
"""

import math

import pytest
import torch
from torch import nn

from bigbatch.optim import LAMB, LARS, VRSGD
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.training.adaptive_batch import AdaptiveBatch

TRIALS = 400  # steps from one start
PAIRS = [(3.0, 1.0), (1.0, 0.0)] * 4  # G = (2, .5), s2 = (1, .25), G^2 / s2 = (4, 1)


def after(optimizer_of, start, gradients):
    """A layer (1, 2) after one step on the mean of these micro-batch gradients."""
    weight = nn.Parameter(torch.tensor([start]).double())
    optimizer = optimizer_of([weight])
    for gradient in gradients:
        ((weight * torch.tensor([gradient]).double()).sum() / len(gradients)).backward()
    optimizer.step()
    return weight.detach()[0].tolist()


def test_the_trust_ratio_of_lars():
    # You et al. 2017 (1708.03888), algorithm 1: .001 x 5 / (1 + .1 x 5)
    first, _ = after(lambda p: LARS(p, lr=1.0, weight_decay=0.1), (3.0, 4.0), [(0.6, 0.8)])
    assert pytest.approx(1 / 300, abs=1e-9) == (3 - first) / 0.9


def test_the_first_step_of_lamb():
    # You et al. 2020 (1904.00962), algorithm 2: .1 x 5 / sqrt 2
    lamb = after(lambda p: LAMB(p, 0.1, weight_decay=0.0, eps=1e-12), (3.0, 4.0), [(0.6, 0.8)])
    assert pytest.approx(0.5 / 2**0.5, abs=1e-8) == 3 - lamb[0]


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        # VRGD (Jiang et al. 2023, 2309.13681), equations 2 and 7 to 9: (4, 1) over its mean
        ({"r_max": 1.0}, (1.0, 0.4)),
        ({"r_max": 10.0}, (1.6, 0.4)),
        # equation 9: with gamma = 1, r = 1
        ({"gamma": 1.0, "r_max": 1.0}, (1.0, 1.0)),
    ],
)
def test_the_factors_of_vr_sgd(settings, factors):
    step = after(lambda p: VRSGD(p, lr=1.0, **settings), (0.0, 0.0), PAIRS)
    assert pytest.approx(factors, abs=1e-9) == (-step[0] / 2.0, -step[1] / 0.5)


class Quadratic(nn.Module):
    """Sample z has the loss sum h theta^2 / 2 + theta z, so its gradient is h theta + z."""

    def __init__(self, curvature, start):
        super().__init__()
        self.theta = nn.Parameter(torch.full_like(curvature, start))
        self.curvature = curvature

    def risk(self):
        return (self.curvature * self.theta.square()).sum() / 2

    def forward(self, noise):
        return self.risk() + noise @ self.theta


def mean_risk(curvature, start, lr, batch_size):
    """(mean risk after one step of the loop, averaged B_simple); the noise's covariance is H."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(TRIALS * batch_size, len(curvature), generator=generator).double()
    model = Quadratic(curvature, start)
    train = AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        [(batch,) for batch in torch.split(noise * curvature.sqrt(), batch_size)],
        policy=Fixed(batch_size),
        micro_batch=batch_size // 8,
        every=1,
    )
    risks, average = [], NoiseAverage(TRIALS, "steps")
    for step in train:
        for (samples,) in step:
            step.backward(model(samples).mean())
        average.update(step.update().statistics)
        risks.append(model.risk().item())
        nn.init.constant_(model.theta, start)
    return sum(risks) / TRIALS, average.grad_variance / average.grad_sqnorm


def test_the_risk_after_a_step_of_the_loop_is_that_of_the_noisy_quadratic():
    # Zhang et al. 2019 (1907.04164): sum h ((1 - lr h)^2 theta^2 + lr^2 h / B) / 2
    h, lr, batch_size = 1 / torch.arange(1, 51, dtype=torch.float64), 0.5, 32
    m2, s2 = (1 - lr * h).square(), lr**2 * h / batch_size
    risk, scale = mean_risk(h, 1.0, lr, batch_size)
    # var of h theta'^2 / 2 with theta' normal: h^2 (2 s^4 + 4 m^2 s^2) / 4
    variance = float((h.square() * (2 * s2.square() + 4 * m2 * s2) / 4).sum())
    assert (
        pytest.approx(float((h * (m2 + s2)).sum() / 2), abs=4 * math.sqrt(variance / TRIALS))
        == risk
    )
    # sum h_i / sum h_i^2; a step's own has a deviation of .37
    assert pytest.approx(float(h.sum() / h.square().sum()), rel=0.075) == scale


def test_the_greedy_rate_at_twice_the_noise_scale():
    # McCandlish et al. 2018 (1812.06162): lr* = 1 / (1 + B_n / B) at H = I
    # risk: theta^2 (1 - lr*) / 2
    risk, scale = mean_risk(torch.ones(100, dtype=torch.float64), 24**-0.5, 2 / 3, 48)
    assert pytest.approx(2 / 3, abs=0.02) == 1 / (1 + scale / 48)
    assert pytest.approx(100 / 24 / 6, abs=0.02) == risk
