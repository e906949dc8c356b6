"""What is trained for the table and both figures, and what was measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from bigbatch.experiments.linear_regression.experiment import (
    STEPS,
    Arm,
    Trace,
    printed,
    sgd,
    train,
    widened,
)
from bigbatch.experiments.linear_regression.input_distributions import InputDistribution

SGD, PRINTED, WIDENED = "SGD", "r <= 1", "r <= 1/gamma"
METHODS: dict[str, Callable[[float], Arm]] = {SGD: sgd, PRINTED: printed, WIDENED: widened}
CLIPS = {PRINTED: printed, WIDENED: widened}

GAMMAS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
KS = tuple(2**power for power in range(1, 11))
STIFFNESS = tuple(0.01 * 2 ** (power / 4) for power in range(39))  # lr x curvature, .01 to 7.2
PASSES = (
    2  # over the batches of a distribution: the second for the controls, which need the first's r
)


@dataclass(frozen=True)
class Spread:
    """A number over seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Tensor) -> "Spread":
        """Of a tensor with one value a seed."""
        each = values.double().where(~values.isnan(), torch.inf).tolist()
        return cls(median(each), min(each), max(each))


@dataclass(frozen=True)
class Findings:
    """What was measured with one input distribution.

    Args:
        inputs: how they are drawn.
        traces: of every arm.
        controls: of SGD at lr x mean(r), by the arm whose r it is.
    """

    inputs: InputDistribution
    traces: dict[Arm, Trace]
    controls: dict[Arm, Trace] = field(default_factory=dict)

    def final(self, arm: Arm) -> Spread:
        """Loss after the last step."""
        return Spread.of(self.traces[arm].losses[:, -1])

    def relative(self, arm: Arm) -> Spread:
        """Loss after the last step over SGD's, at the same learning rate and seed."""
        return Spread.of(self.traces[arm].losses[:, -1] / self.traces[sgd(arm.lr)].losses[:, -1])

    def steps_needed(self, arm: Arm, plain: Arm) -> Spread:
        """Steps until its loss is another arm's last one; inf for never."""
        goal = self.traces[plain].losses[:, -1:]
        return Spread.of(first_below(self.traces[arm].losses, goal))

    def mean_r(self, arm: Arm) -> Spread:
        """r over all weights and steps."""
        return Spread.of(self.traces[arm].r.mean((1, 2)))

    def control(self, arm: Arm) -> Spread:
        """Last loss of SGD at lr x mean(r)."""
        return Spread.of(self.controls[arm].losses[:, -1])

    def best(self, method: str) -> Arm:
        """The method at the learning rate of the grid whose worst seed has the least last loss."""
        arms = [METHODS[method](lr) for lr in grid(self.inputs)]
        return min(arms, key=lambda arm: (self.final(arm).most, self.final(arm).median))


def first_below(losses: Tensor, goal: Tensor) -> Tensor:
    """First step at which each row of (S, 101) losses is no more than its goal; inf for never."""
    below = losses <= goal
    first = below.double().argmax(1).double()
    return first.where(below.any(1), torch.inf)


def grid(inputs: InputDistribution) -> list[float]:
    """The learning rates that every method is tuned over."""
    return [stiffness / inputs.curvature for stiffness in STIFFNESS]


def against_gamma(clip: str, lr: float) -> dict[float, Arm]:
    """One arm for each of `GAMMAS`."""
    return {gamma: CLIPS[clip](lr, gamma=gamma) for gamma in GAMMAS}


def against_k(clip: str, lr: float) -> dict[float, Arm]:
    """One arm for each of `KS`."""
    return {k: CLIPS[clip](lr, k=k) for k in KS}


def arms_of(inputs: InputDistribution) -> set[Arm]:
    """Everything to be trained in the first pass."""
    arms = {make(lr) for make in METHODS.values() for lr in (*inputs.lrs, *grid(inputs))}
    for lr in inputs.lrs:
        for clip in CLIPS:
            arms |= {*against_gamma(clip, lr).values(), *against_k(clip, lr).values()}
    return arms


def study(
    inputs: InputDistribution,
    seeds: int,
    steps: int = STEPS,
    advance: Callable[[], None] = lambda: None,
) -> Findings:
    """Trains all arms of an input distribution, then SGD at each VR arm's lr x mean(r).

    Args:
        inputs: how they are drawn.
        seeds: runs of each arm.
        steps: of each run.
        advance: called after each step of each of the `PASSES`.
    """
    found = Findings(inputs, train(inputs, arms_of(inputs), seeds, steps, advance))
    shown = [clip(lr) for clip in CLIPS.values() for lr in inputs.lrs]
    shown += [found.best(clip) for clip in CLIPS]
    pairs = {arm: sgd(arm.lr * found.mean_r(arm).median) for arm in shown}
    slowed = train(inputs, pairs.values(), seeds, steps, advance)
    found.controls.update({arm: slowed[control] for arm, control in pairs.items()})
    return found
