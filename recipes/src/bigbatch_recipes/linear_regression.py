"""Linear regression by SGD and VR-SGD: figures 1 and 3 of the VRGD paper, and a table.

    y = sum_i W_i x_i,  W_i = i  (i = 1 .. 10);   w_0 = 0;   loss = E (w x - y)^2

Many arms train at once on the same draws. Shapes: S seeds, L learning rates, K groups (the paper's
devices, our micro-batches), 10 weights. From the paper: W, w_0, the mean squared error, 100 steps,
batches of 2,048, gamma = 0.1. Ours: input distributions, which the paper does not name, learning
rates, K = 64, a fresh batch each step, and 4,096 fixed inputs for the loss.

Source:
    VRGD (Jiang et al. 2023, arXiv 2309.13681), sections 7.2 and 7.3.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.log.history import Table
from bigbatch.optim.functional import gsnr
from bigbatch_recipes.new_directory import create_directory_atomically

INPUTS = 10
STEPS = 100
BATCH = 2048
GROUPS = 64
GAMMA = 0.1
TEST_INPUTS = 4096
TRUTH = torch.arange(1, INPUTS + 1, dtype=torch.float64)
GAMMAS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
KS = tuple(2**power for power in range(1, 11))
STIFFNESS = tuple(0.01 * 2 ** (power / 4) for power in range(39))  # lr x curvature, .01 to 7.2
COLUMNS = (
    *("inputs", "lr", "method", "mean r", "SGD, lr", "VR-SGD, lr", "SGD, lr x mean r"),
    "steps for SGD's loss",
)

_ROUNDING = 1e-27  # the loss of weights that are exact up to float64's rounding


@dataclass(frozen=True)
class InputDistribution:
    """Independent inputs x_i of one shape, each with its own mean and standard deviation."""

    name: str  # its name in tables and figures
    uniform: bool  # whether draws are uniform; they are normal otherwise
    mean: float  # mean of every input
    std: tuple[float, ...]  # standard deviation of each input
    lrs: tuple[float, ...]  # learning rates to compare at
    shown: float  # the learning rate that the first figure draws

    def draw(self, generator: torch.Generator, samples: int) -> Tensor:
        """Inputs of shape (samples, 10), float64."""
        shape = (samples, INPUTS)
        if self.uniform:
            z = torch.rand(shape, generator=generator, dtype=torch.float64)
            z = (z - 0.5) * math.sqrt(12)
        else:
            z = torch.randn(shape, generator=generator, dtype=torch.float64)
        return z * torch.tensor(self.std, dtype=torch.float64) + self.mean

    @property
    def curvature(self) -> float:
        """Largest eigenvalue of the Hessian 2 E[x x^T]; SGD diverges from lr = 2 / it on."""
        moments = torch.diag(torch.tensor(self.std, dtype=torch.float64).square()) + self.mean**2
        return 2 * float(torch.linalg.eigvalsh(moments)[-1])


_BOX = math.sqrt(1 / 12)  # standard deviation of a uniform draw from an interval of length 1
_SINE = tuple(math.sin(i * math.pi / 11) for i in range(1, 11))
_TRIANGLE = tuple(min(i, 11 - i) / 5 for i in range(1, 11))

DISTRIBUTIONS = (
    InputDistribution("N(0, 1)", False, 0.0, (1.0,) * INPUTS, (0.005, 0.02, 0.1), 0.02),
    InputDistribution("U(-1, 1)", True, 0.0, (2 * _BOX,) * INPUTS, (0.02, 0.1), 0.1),
    InputDistribution("U(0, 1)", True, 0.5, (_BOX,) * INPUTS, (0.02, 0.1, 0.2, 0.3, 0.38), 0.2),
    InputDistribution("N, sine", False, 0.0, _SINE, (0.02, 0.05, 0.1), 0.05),
    InputDistribution("N, triangle", False, 0.0, _TRIANGLE, (0.02, 0.05, 0.1), 0.05),
)


class Arm(NamedTuple):
    """One way to train. SGD is gamma = 1, r_max = 1, where r = 1."""

    k: int  # number of groups that the batch is split into; divides 2,048
    gamma: float  # lower clip of r
    r_max: float  # upper clip of r
    lr: float  # learning rate


def sgd(lr: float) -> Arm:
    """Plain SGD."""
    return Arm(GROUPS, 1.0, 1.0, lr)


def vr_sgd(lr: float, gamma: float = GAMMA, k: int = GROUPS) -> Arm:
    """VR-SGD with r in [gamma, 1], as equation 9 prints it."""
    return Arm(k, gamma, 1.0, lr)


def vr_sgd_wide(lr: float, gamma: float = GAMMA, k: int = GROUPS) -> Arm:
    """VR-SGD with r in [gamma, 1 / gamma], as the paper's text can be read."""
    return Arm(k, gamma, 1 / gamma, lr)


CLIPS: dict[str, Callable[..., Arm]] = {"r <= 1": vr_sgd, "r <= 1/gamma": vr_sgd_wide}
METHODS: dict[str, Callable[..., Arm]] = {"SGD": sgd, **CLIPS}


@dataclass(frozen=True)
class Trace:
    """Losses, weights and factors of one arm."""

    losses: Tensor  # (S, 101), on the fixed test inputs, before the first step and after each
    weights: Tensor  # (S, 101, 10), at the same moments
    r: Tensor  # (S, 100, 10), the factor of each step


class Draws:
    """The batches of each seed, one after another; equal seeds give equal draws."""

    def __init__(self, inputs: InputDistribution, seeds: int) -> None:
        self._inputs = inputs
        self._generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
        self.test = self._draw(TEST_INPUTS)

    def batch(self) -> Tensor:
        """The next batch, (S, 2048, 10)."""
        return self._draw(BATCH)

    def _draw(self, samples: int) -> Tensor:
        return torch.stack([self._inputs.draw(each, samples) for each in self._generators])


def moments(inputs: Tensor, k: int) -> Tensor:
    """Mean x x^T of each of k equal groups of consecutive samples, (S, K, 10, 10).

    All that loss and gradient need of the inputs, since y is linear in them too:
    loss = d^T M d and gradient = 2 M d with d = w - W.
    """
    seeds, samples, _ = inputs.shape
    x = inputs.view(seeds, k, samples // k, INPUTS)
    return x.mT @ x / x.shape[2]


def step(
    weights: Tensor, groups: Tensor, lrs: Tensor, gamma: float, r_max: float
) -> tuple[Tensor, Tensor]:
    """One step of VR-SGD, all seeds and learning rates at once.

        g_d = 2 E_d[x (w x - y)];   w <- w - lr r g,   r = GSNR of the k gradients g_d

    Args:
        weights: (S, L, 10).
        groups: `moments` of the batch, (S, K, 10, 10).
        lrs: (L,).
        gamma: lower clip of r.
        r_max: upper clip of r.
    Returns:
        The next weights and r, both (S, L, 10).
    """
    k = groups.shape[1]
    gradients = 2 * (groups @ (weights - TRUTH).mT.unsqueeze(1))  # (S, K, 10, L)
    total = gradients.sum(1)
    m2 = (gradients - total.unsqueeze(1) / k).square().sum(1)
    rule = torch.vmap(partial(gsnr, weight=k, gamma=gamma, r_max=r_max))  # a vector is a layer
    r = rule(total.mT.flatten(0, 1), m2.mT.flatten(0, 1)).view(total.mT.shape)
    return weights - lrs.unsqueeze(1) * r * total.mT / k, r


def losses_of(weights: Tensor, test: Tensor) -> Tensor:
    """Mean squared error on the test inputs, (S, T); weights (S, T, 10), `moments` (S, 10, 10)."""
    delta = weights - TRUTH
    return ((delta @ test) * delta).sum(-1)


def train(
    inputs: InputDistribution, arms: Iterable[Arm], seeds: int, steps: int = STEPS
) -> dict[Arm, Trace]:
    """Trains every arm on the same batches; those that differ in the learning rate, together."""
    draws = Draws(inputs, seeds)
    test = moments(draws.test, 1).squeeze(1)
    by_rule = {rule: list(group) for rule, group in groupby(sorted(set(arms)), lambda arm: arm[:3])}
    lrs = {
        rule: torch.tensor([arm.lr for arm in group], dtype=torch.float64)
        for rule, group in by_rule.items()
    }
    weights = {rule: [torch.zeros(seeds, len(lrs[rule]), INPUTS).double()] for rule in by_rule}
    factors: dict[tuple[float, ...], list[Tensor]] = {rule: [] for rule in by_rule}
    for _ in range(steps):
        batch = draws.batch()
        groups = {k: moments(batch, k) for k in {k for k, *_ in by_rule}}
        for rule in by_rule:
            k, gamma, r_max = rule
            after, r = step(weights[rule][-1], groups[k], lrs[rule], gamma, r_max)
            weights[rule].append(after)
            factors[rule].append(r)
    traces = {}
    for rule, group in by_rule.items():
        w, r = torch.stack(weights[rule], 2), torch.stack(factors[rule], 2)
        for number, arm in enumerate(group):
            traces[arm] = Trace(losses_of(w[:, number], test), w[:, number], r[:, number])
    return traces


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value over seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Tensor) -> "Spread":
        """Of a tensor with one value per seed; nan counts as inf."""
        numbers = values.double().where(~values.isnan(), torch.inf).tolist()
        return cls(median(numbers), min(numbers), max(numbers))


@dataclass(frozen=True)
class Findings:
    """Measurements with one input distribution."""

    inputs: InputDistribution  # the input distribution
    traces: dict[Arm, Trace]  # of every arm
    # traces of SGD at lr x mean(r), by the arm whose r it is
    controls: dict[Arm, Trace] = field(default_factory=dict)

    def final(self, arm: Arm) -> Spread:
        """Loss after the last step."""
        return Spread.of(self.traces[arm].losses[:, -1])

    def relative(self, arm: Arm) -> Spread:
        """Loss after the last step over SGD's, at the same learning rate and seed."""
        return Spread.of(self.traces[arm].losses[:, -1] / self.traces[sgd(arm.lr)].losses[:, -1])

    def steps_needed(self, arm: Arm, reference: Arm) -> Spread:
        """Steps until the arm's loss is the reference's last loss or less; inf for never."""
        goal = self.traces[reference].losses[:, -1:]
        return Spread.of(first_below(self.traces[arm].losses, goal))

    def mean_r(self, arm: Arm) -> Spread:
        """Mean of r over all weights and steps."""
        return Spread.of(self.traces[arm].r.mean((1, 2)))

    def control(self, arm: Arm) -> Spread:
        """Last loss of SGD at lr x mean(r)."""
        return Spread.of(self.controls[arm].losses[:, -1])

    def best(self, method: str) -> Arm:
        """The method at the learning rate of the grid whose worst seed has the least last loss."""
        arms = [METHODS[method](lr) for lr in lr_grid(self.inputs)]
        return min(arms, key=lambda arm: (self.final(arm).most, self.final(arm).median))


def first_below(losses: Tensor, goal: Tensor) -> Tensor:
    """First step at which each row of (S, 101) losses is no more than its goal; inf for never."""
    below = losses <= goal
    first = below.double().argmax(1).double()
    return first.where(below.any(1), torch.inf)


def lr_grid(inputs: InputDistribution) -> list[float]:
    """The learning rates that every method is tuned over."""
    return [stiffness / inputs.curvature for stiffness in STIFFNESS]


def arms_along(parameter: str, clip: str, lr: float) -> dict[float, Arm]:
    """One arm for each of `GAMMAS` or `KS`, where `parameter` is "gamma" or "k"."""
    values = GAMMAS if parameter == "gamma" else KS
    return {value: CLIPS[clip](lr, **{parameter: value}) for value in values}


def study(inputs: InputDistribution, seeds: int, steps: int = STEPS) -> Findings:
    """Trains all arms of an input distribution, then SGD at each VR arm's lr x mean(r)."""
    arms = {make(lr) for make in METHODS.values() for lr in (*inputs.lrs, *lr_grid(inputs))}
    for lr in inputs.lrs:
        for clip in CLIPS:
            arms |= {*arms_along("gamma", clip, lr).values(), *arms_along("k", clip, lr).values()}
    findings = Findings(inputs, train(inputs, arms, seeds, steps))
    vr_arms = [clip(lr) for clip in CLIPS.values() for lr in inputs.lrs]
    vr_arms += [findings.best(clip) for clip in CLIPS]
    controls = {arm: sgd(arm.lr * findings.mean_r(arm).median) for arm in vr_arms}
    traces = train(inputs, controls.values(), seeds, steps)
    findings.controls.update({arm: traces[control] for arm, control in controls.items()})
    return findings


def run(path: Path, seeds: int) -> Table:
    """Trains all arms, and writes table.md, figure1.svg and figure3.svg to a new directory.

    Returns:
        The table.
    """
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    with create_directory_atomically(path) as folder:
        return write([study(inputs, seeds) for inputs in DISTRIBUTIONS], folder)


def write(findings: Sequence[Findings], folder: Path) -> Table:
    """Writes the table and both figures into `folder`; returns the table."""
    from bigbatch_recipes import linear_regression_figures as figures

    (folder / "figure1.svg").write_text(figures.figure1(findings))
    (folder / "figure3.svg").write_text(figures.figure3(findings))
    table = Table(COLUMNS, [row for finding in findings for row in rows_of(finding)])
    lines = [COLUMNS, ("---",) * len(COLUMNS), *table.rows]
    (folder / "table.md").write_text("".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return table


def rows_of(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Both clips at every learning rate, then SGD and each clip at its own best one."""
    for lr in findings.inputs.lrs:
        for clip, method in CLIPS.items():
            yield _row(findings, f"{lr:g}", clip, sgd(lr), method(lr))
    sgd_arm = findings.best("SGD")
    for clip in CLIPS:
        arm = findings.best(clip)
        yield _row(findings, f"best: {sgd_arm.lr:.3g}, {arm.lr:.3g}", clip, sgd_arm, arm)


def _row(findings: Findings, lr: str, clip: str, sgd_arm: Arm, arm: Arm) -> tuple[str, ...]:
    losses = (findings.final(sgd_arm), findings.final(arm), findings.control(arm))
    exact = losses[0].median < _ROUNDING
    steps = "-" if exact else steps_text(findings.steps_needed(arm, sgd_arm))
    mean = findings.mean_r(arm).median
    return findings.inputs.name, lr, clip, f"{mean:.3f}", *map(loss_text, losses), steps


def loss_text(loss: Spread) -> str:
    """Median [least, most]; a loss below 1e-27 is float64's rounding."""

    def text_of(value: float) -> str:
        if value < _ROUNDING:
            return "rounding"
        return f"{value:.3g}" if value < math.inf else "diverged"

    return _spread_text(loss, text_of)


def steps_text(steps: Spread) -> str:
    """Median [least, most]."""
    return _spread_text(steps, lambda value: f"{value:g}" if value < math.inf else "never")


def _spread_text(spread: Spread, text_of: Callable[[float], str]) -> str:
    middle, least, most = map(text_of, (spread.median, spread.least, spread.most))
    return middle if least == most else f"{middle} [{least}, {most}]"
