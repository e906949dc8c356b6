"""Noisy quadratics: trainings whose expected loss, noise scale and best schedule are known.

Coordinate i has curvature h_i and gradient h_i theta_i + e, with Var e = c_i / B at batch size B.
Only E theta_i^2 matters for the loss, and a step changes it in closed form. Coordinates of nearly
equal curvature are one group. Arrays have one row per group and one column per training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bigbatch.statistics.noise_scale import GradientStatistics

Array = NDArray[np.float64]
Optimizer = Literal["sgd", "momentum", "preconditioned"]
Rate = Literal["greedy", "decaying", "constant"]
Noise = Literal["proportional", "isotropic"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "momentum", "preconditioned")
RATES: tuple[Rate, ...] = ("greedy", "decaying", "constant")
NOISES: dict[Noise, Callable[[Array], Array]] = {  # c / noise, of h
    "proportional": np.copy,
    "isotropic": np.ones_like,
}
BASE_BATCH = 64  # at which a rate that is scaled by the square root is as it is set

_MOMENTUM = 0.9
_BINS = 24  # groups of a spectrum
_LAST_RATE = 0.1  # of the peak, where a decaying rate ends
_DIVERGED = 30.0  # relative loss
_MAX_STEPS = 4000
_HOPELESS = 1.5  # times the best time so far, after which a training is given up


@dataclass(frozen=True)
class Moment:
    """Where trainings stand before a step; arrays of one number per training."""

    noise_scale: Array
    log_loss: Array  # ln of the relative loss
    samples: Array  # consumed so far
    decay: Array  # scheduled rate over its peak
    rows: NDArray[np.int64]  # numbers of the trainings


Rule = Callable[[Moment], Array]
"""Batch sizes of the next step."""


@dataclass(frozen=True)
class Spectrum:
    """Curvatures, and how many coordinates have each."""

    curvatures: Array
    counts: Array


def _harmonic() -> Spectrum:
    """1, 1/2, ... 1/1000 in groups of nearly equal curvature."""
    values = 1 / np.arange(1, 1001)
    edges = np.geomspace(values[0], values[-1], _BINS + 1)[1:-1]
    groups = [g for g in np.split(values, np.searchsorted(-values, -edges, "right")) if g.size]
    return Spectrum(np.array([g.mean() for g in groups]), np.array([float(g.size) for g in groups]))


SPECTRA = {
    "1/i": _harmonic(),
    "flat": Spectrum(np.ones(1), np.full(1, 100.0)),
    "two-scale": Spectrum(np.array([1.0, 0.02]), np.array([10.0, 1000.0])),
}


@dataclass(frozen=True)
class Bed:
    """A training on a noisy quadratic, from theta_i^2 = 1 until the loss is `target` of its start.

    Args:
        spectrum: a name in `SPECTRA`.
        optimizer: SGD; with momentum .9; or SGD whose gradients are divided by sqrt(h).
        rate: "greedy", the rate that lowers the next step's expected loss most (times 1 - .9 with
            momentum); "constant"; or "decaying", linearly in samples to a tenth. The last two are
            times sqrt(B / 64).
        overhead: samples that take as long as the fixed part of a step.
        target: relative loss at the end.
        noise: c_i over its shape.
        noise_shape: a name in `NOISES`: "proportional" to h, where B_simple is at most 3.3 times
            the critical batch tr(H Sigma) / (G'HG) of the start; or "isotropic", the same in every
            coordinate, where it is 32 to 98 times that.
    Source:
        Zhang et al. 2019 (arXiv 1907.04164), section 3.
    """

    spectrum: str
    optimizer: Optimizer
    rate: Rate
    overhead: float
    target: float
    noise: float
    noise_shape: Noise = "proportional"

    def __str__(self) -> str:
        return f"{self.spectrum}, {self.optimizer}, overhead {self.overhead:,.0f}"

    @property
    def curvatures(self) -> Array:
        """h."""
        return SPECTRA[self.spectrum].curvatures

    @property
    def counts(self) -> Array:
        """Coordinates of each group."""
        return SPECTRA[self.spectrum].counts

    @property
    def momentum(self) -> float:
        """Decay of the velocity; 0 without one."""
        return _MOMENTUM if self.optimizer == "momentum" else 0.0

    @cached_property
    def variances(self) -> Array:
        """c."""
        return self.noise * NOISES[self.noise_shape](self.curvatures)

    @cached_property
    def preconditioner(self) -> Array:
        """Factors of the gradient's coordinates."""
        preconditioned = self.optimizer == "preconditioned"
        return self.curvatures**-0.5 if preconditioned else np.ones_like(self.curvatures)

    @cached_property
    def grad_variance(self) -> float:
        """tr Sigma."""
        return float(self.counts @ self.variances)

    def start(self, trainings: int) -> Array:
        """Second moments at the start, (moments, groups, trainings); see `step`."""
        moments = np.zeros((3 if self.momentum else 1, len(self.counts), trainings))
        moments[0] = 1
        return moments

    def loss(self, moments: Array) -> Array:
        """Expected loss over that of the start."""
        weights = self.counts * self.curvatures
        return np.asarray(weights @ moments[0] / weights.sum())

    def grad_sqnorm(self, moments: Array) -> Array:
        """|mu|^2."""
        return np.asarray((self.counts * self.curvatures**2) @ moments[0])

    def greedy_rate(self, moments: Array, batch_size: Array) -> Array:
        """The rate that lowers the expected loss of the next step most."""
        h, q = self.curvatures, self.preconditioner
        gain = (self.counts * h**2 * q) @ moments[0]
        weights = self.counts * h * q**2
        cost = (weights * h**2) @ moments[0] + weights @ self.variances / batch_size
        return np.asarray((1 - self.momentum) * gain / cost)

    def decay(self, samples: Array, length: Array) -> Array:
        """The scheduled rate over its peak."""
        if self.rate != "decaying":
            return np.ones_like(samples)
        return np.asarray(np.maximum(1 - (1 - _LAST_RATE) * samples / length, _LAST_RATE))

    def scheduled_rate(self, peak: Array, decay: Array, batch_size: Array) -> Array:
        """The scheduled rate, times the square root of the batch size."""
        return np.asarray(peak * decay * np.sqrt(batch_size / BASE_BATCH))

    def step(self, moments: Array, rate: Array, batch_size: Array) -> None:
        """One step, in place, of E theta^2 and with momentum E theta v and E v^2.

        SGD:       theta <- theta - eta q (h theta + e)
        momentum:  v <- .9 v + h theta + e,  theta <- theta - eta v
        """
        h, c = self.curvatures[:, None], self.variances[:, None] / batch_size
        step = rate * self.preconditioner[:, None]
        if not self.momentum:
            moments[0] = (1 - step * h) ** 2 * moments[0] + step**2 * c
            return
        square, product, velocity = moments
        decay = self.momentum
        velocity = decay**2 * velocity + 2 * decay * h * product + h**2 * square + c
        product = decay * product + h * square
        moments[0] = square - 2 * step * product + step**2 * velocity
        moments[1], moments[2] = product - step * velocity, velocity

    def run(
        self,
        rule: Rule,
        log_rates: Array,
        limit: float = math.inf,
        max_change: float = math.inf,
        start: float = BASE_BATCH,
    ) -> Array:
        """Trains every column until the target; (time, samples, steps), infinite where it failed.

        Time is in samples: samples + overhead steps. The last step counts in part. A training is
        given up at the limit, and when it has taken 1.5 times as long as the best.

        Args:
            rule: the batch sizes.
            log_rates: ln of the peak rate and of the length of the decay, (trainings, 2).
            limit: time after which a training is given up.
            max_change: largest factor between the batch sizes of two steps.
            start: the batch size before the first step, for that factor.
        """
        peak, length = np.exp(log_rates.T)
        batch_size = np.full(len(peak), float(start))
        trainings = np.arange(len(peak))
        results = np.full((3, len(peak)), np.inf)
        moments, samples = self.start(len(peak)), np.zeros(len(peak))
        loss = self.loss(moments)
        for steps in range(_MAX_STEPS):
            noise_scale = self.grad_variance / self.grad_sqnorm(moments)
            decay = self.decay(samples, length[trainings])
            moment = Moment(noise_scale, np.log(loss), samples, decay, trainings)
            wanted = np.maximum(rule(moment), 1.0)
            batch_size = np.clip(wanted, batch_size / max_change, batch_size * max_change)
            if self.rate == "greedy":
                rate = self.greedy_rate(moments, batch_size)
            else:
                rate = self.scheduled_rate(peak[trainings], decay, batch_size)
            self.step(moments, rate, batch_size)
            samples = samples + batch_size
            next_loss = self.loss(moments)
            done = next_loss <= self.target
            part = last_part(loss[done], next_loss[done], self.target)
            results[1, trainings[done]] = samples[done] - (1 - part) * batch_size[done]
            results[2, trainings[done]] = steps + part
            results[0] = results[1] + self.overhead * results[2]
            limit = min(limit, _HOPELESS * float(results[0].min()))
            runs = ~done & (next_loss < _DIVERGED) & (samples + self.overhead * steps < limit)
            if not runs.any():
                break
            if not runs.all():
                moments = np.ascontiguousarray(moments[:, :, runs])
                trainings, samples, next_loss = trainings[runs], samples[runs], next_loss[runs]
                batch_size = batch_size[runs]
            loss = next_loss
        return results

    def measure(
        self, moments: Array, samples: int, micro_batches: int, generator: np.random.Generator
    ) -> GradientStatistics:
        """What a step of k micro-batches measures, drawn from its distribution.

        With G the gradient, |G|^2 and the spread of the micro-batches are sums over the groups of
        noncentral and central chi-squared numbers; they are independent.
        """
        scale = self.variances / samples
        signal = self.counts * self.curvatures**2 * moments[0][:, 0] / scale
        sqnorm = float(scale @ generator.noncentral_chisquare(self.counts, signal))
        freedom = micro_batches - 1
        spread = generator.chisquare(freedom * self.counts)
        variance = float(self.variances @ spread) / freedom
        return GradientStatistics(sqnorm - variance / samples, variance, samples, micro_batches)


def last_part(before: Array, after: Array, target: float) -> Array:
    """The part of a step after which the loss, on its way from `before`, is at the target."""
    return np.asarray(np.log(before / target) / np.log(before / after))
