"""Known answers of optimizer steps: layers by hand, a noisy quadratic, the VRGD paper's figure."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.optim.lamb import LAMB
from bigbatch.optim.lars import LARS
from bigbatch.optim.vr_optimizers import VRSGD
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.linear_regression import (
    DISTRIBUTIONS,
    Findings,
    sgd,
    train,
    vr_sgd,
    vr_sgd_wide,
)
from studies.known_answer import EXACT, KnownAnswer

_VRGD = "VRGD (Jiang et al. 2023, 2309.13681)"
_ROUNDING = "rounding"


def run(seed: int) -> Iterator[KnownAnswer]:
    """First elements of layers after one step, risks after a step, steps to a loss."""
    yield from _layers_by_hand()
    yield from _gsnr_by_hand()
    yield from _quadratic(seed)
    yield from _greedy_rate(seed)
    yield from _linear_regression()


def _after(
    optimizer_of: Callable[[list[nn.Parameter]], Optimizer],
    start: Sequence[float],
    gradients: Sequence[Sequence[float]],
) -> Tensor:
    """A layer (1, 2) after one step on the mean of these micro-batch gradients."""
    weight = nn.Parameter(torch.tensor([start]).double())
    optimizer = optimizer_of([weight])
    for gradient in gradients:
        loss = (weight * torch.tensor([gradient]).double()).sum() / len(gradients)
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return weight.detach()[0]


def _layers_by_hand() -> Iterator[KnownAnswer]:
    gradients = [(0.6, 0.8)]
    lars = _after(lambda p: LARS(p, lr=1.0, weight_decay=0.1), (3.0, 4.0), gradients)
    source = "You et al. 2017 (1708.03888), algorithm 1: .001 x 5 / (1 + .1 x 5)"
    rate = (3 - float(lars[0])) / 0.9
    what = "LARS: trust ratio of (3, 4), gradient (.6, .8), decay .1"
    yield KnownAnswer(what, source, 1 / 300, rate, EXACT, _ROUNDING)
    lamb = _after(lambda p: LAMB(p, lr=0.1, weight_decay=0.0, eps=1e-12), (3.0, 4.0), gradients)
    source = "You et al. 2020 (1904.00962), algorithm 2: .1 x 5 / sqrt 2"
    what = "LAMB: first step of (3, 4)"
    yield KnownAnswer(what, source, 0.5 / 2**0.5, 3 - float(lamb[0]), 1e-8, "eps of 1e-12")


def _gsnr_by_hand() -> Iterator[KnownAnswer]:
    # G = (2, .5), s2 = (1, .25), G^2 / s2 = (4, 1), over its mean (1.6, .4)
    gradients = [(3.0, 1.0), (1.0, 0.0)] * 4
    for r_max, expected in ((1.0, 1.0), (10.0, 1.6)):
        optimizer_of = partial(VRSGD, lr=1.0, r_max=r_max)
        step = _after(optimizer_of, (0.0, 0.0), gradients)
        for number, (factor, mean) in enumerate(((expected, 2.0), (0.4, 0.5))):
            what = f"VR-SGD: r of element {number + 1} of 2, r_max = {r_max:g}"
            source = f"{_VRGD}, equations 2 and 7 to 9"
            measured = -float(step[number]) / mean
            yield KnownAnswer(what, source, factor, measured, EXACT, _ROUNDING)
    step = _after(
        lambda p: VRSGD(p, lr=1.0, gamma=1.0, r_max=1.0, factor="gsnr"), (0.0, 0.0), gradients
    )
    what, source = "VR-SGD with gamma = 1: step over SGD's", f"{_VRGD}, equation 9: r = 1"
    yield KnownAnswer(what, source, 1.0, -float(step[0]) / 2.0, EXACT, _ROUNDING)
    step = _after(lambda p: VRSGD(p, lr=1.0, gamma=0.01, factor="shrinkage"), (0.0, 0.0), gradients)
    what = "shrinkage factor of gradients 3 and 1, four times each: t^2 = 28"
    source = "M-SVAG, Balles and Hennig 2018 (1705.07774): t^2 / (1 + t^2)"
    yield KnownAnswer(what, source, 28 / 29, -float(step[0]) / 2.0, EXACT, _ROUNDING)


class _Quadratic(nn.Module):
    """Sample z has the loss sum h theta^2 / 2 + theta z, so its gradient is h theta + z."""

    def __init__(self, curvature: Tensor, start: float) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full_like(curvature, start))
        self._curvature, self._start = curvature, start

    def forward(self, noise: Tensor) -> Tensor:
        """The loss of each sample."""
        return self.risk() + noise @ self.theta

    def risk(self) -> Tensor:
        """The expected loss."""
        return (self._curvature * self.theta.square()).sum() / 2

    def reset(self) -> None:
        """Back to the start."""
        nn.init.constant_(self.theta, self._start)


def _risks(
    curvature: Tensor, start: float, lr: float, batch_size: int, seed: int
) -> tuple[list[float], NoiseAverage]:
    """Risks after one step from the start, by the adaptive loop, and the noise it measured.

    The noise of a sample has the covariance H.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_TRIALS * batch_size, len(curvature), generator=generator)
    model = _Quadratic(curvature, start)
    batches = torch.split(noise.double() * curvature.sqrt(), batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    meter, average = GradientMeter(model), NoiseAverage(_TRIALS, "steps")
    loop = AdaptiveBatch(
        *(model, optimizer, [(batch,) for batch in batches]),
        policy=Fixed(batch_size),
        micro_batch=batch_size // 8,
        meter=meter,
        every=1,
    )
    risks = []
    for step in loop:
        for (samples,) in step:
            step.backward(model(samples).mean())
        record = step.update()
        if record.statistics is not None:
            average.update(record.statistics)
        risks.append(model.risk().item())
        model.reset()
    return risks, average


_TRIALS = 400  # steps from one start


def _expected_risk(curvature: Tensor, start: float, lr: float, batch_size: int) -> float:
    """sum h ((1 - lr h)^2 theta^2 + lr^2 h / B) / 2."""
    decay, noise = 1 - lr * curvature, lr**2 * curvature / batch_size
    return float((curvature * (decay.square() * start**2 + noise)).sum() / 2)


def _quadratic(seed: int) -> Iterator[KnownAnswer]:
    curvature = 1 / torch.arange(1, 51, dtype=torch.float64)
    lr, batch_size = 0.5, 32
    risks, average = _risks(curvature, 1.0, lr, batch_size, seed)
    expected = _expected_risk(curvature, 1.0, lr, batch_size)
    source = "Zhang et al. 2019 (1907.04164): exact risk of the noisy quadratic"
    # var of h theta'^2 / 2 with theta' normal: h^2 (2 s^4 + 4 m^2 s^2) / 4
    m2, s2 = (1 - lr * curvature).square(), lr**2 * curvature / batch_size
    variance = float((curvature.square() * (2 * s2.square() + 4 * m2 * s2) / 4).sum())
    error = 4 * math.sqrt(variance / _TRIALS)
    what, reason = "risk after a step of the loop, h_i = 1 / i", f"4 standard errors of {_TRIALS}"
    yield KnownAnswer(what, source, expected, sum(risks) / len(risks), error, reason)
    trace, signal = float(curvature.sum()), float(curvature.square().sum())
    scale = average.grad_variance / average.grad_sqnorm
    what, reason = "B_simple of that quadratic", f"4 standard errors of {_TRIALS}, .37 each"
    source = "sum h_i / sum h_i^2 at theta = 1, noise covariance H"
    yield KnownAnswer(what, source, trace / signal, scale, 0.075 * trace / signal, reason)


def _greedy_rate(seed: int) -> Iterator[KnownAnswer]:
    curvature, batch_size = torch.ones(100, dtype=torch.float64), 48
    # tr Sigma = 100 and |mu|^2 = 100 / 24: B_n = 24, so lr* = 1 / (1 + 24 / 48)
    risks, average = _risks(curvature, 24**-0.5, 2 / 3, batch_size, seed)
    source = "McCandlish et al. 2018 (1812.06162), eps_max / (1 + B_n / B) at H = I"
    rate = 1 / (1 + average.grad_variance / average.grad_sqnorm / batch_size)
    what, reason = "greedy-optimal learning rate at B = 2 B_n", f"4 standard errors of {_TRIALS}"
    yield KnownAnswer(what, source, 2 / 3, rate, 0.02, reason)
    what, source = "risk after a step of that rate", "arithmetic: theta^2 (1 - lr*) / 2"
    yield KnownAnswer(what, source, 100 / 24 / 6, sum(risks) / len(risks), 0.02, reason)


def _linear_regression() -> Iterator[KnownAnswer]:
    (uniform,) = (inputs for inputs in DISTRIBUTIONS if inputs.name == "U(0, 1)")
    lr, seeds = 0.2, 3
    arms = [make(lr) for make in (sgd, vr_sgd, vr_sgd_wide)] + [vr_sgd(lr, gamma=1.0)]
    findings = Findings(uniform, train(uniform, arms, seeds))
    source = f"{_VRGD}, section 7.2: about 50 of 100"
    what = "steps of VR-SGD to SGD's loss, r <= 1/gamma, U(0, 1)"
    measured = findings.steps_needed(vr_sgd_wide(lr), sgd(lr)).median
    reason = "inputs and lr are not in the paper"
    yield KnownAnswer(what, source, 50, measured, 10, reason)
    what, source = "its loss with gamma = 1 over SGD's", f"{_VRGD}, section 7.3: gamma = 1 is SGD"
    measured = findings.relative(vr_sgd(lr, gamma=1.0)).median
    yield KnownAnswer(what, source, 1.0, measured, EXACT, _ROUNDING)
