"""Linear regression by SGD and VR-SGD, many arms at once over the same draws.

    y = sum_i W_i x_i,  W_i = i  (i = 1 .. 10);   w_0 = 0;   loss = E (w x - y)^2

Shapes: S seeds, L learning rates, K groups (the paper's devices, our micro-batches), 10 weights.
From the paper: W, w_0, the mean squared error, 100 steps, batches of 2,048, gamma = 0.1. Ours:
input distributions, learning rates, K = 64, a fresh batch each step, and 4,096 fixed inputs for
the loss.

Source:
    VRGD (Jiang et al. 2023, arXiv 2309.13681), sections 7.2 and 7.3.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from bigbatch.experiments.linear_regression.input_distributions import INPUTS, InputDistribution
from bigbatch.optim.functional import gsnr

STEPS = 100
BATCH = 2048
GROUPS = 64
GAMMA = 0.1
TEST_INPUTS = 4096
TRUTH = torch.arange(1, INPUTS + 1, dtype=torch.float64)


@dataclass(frozen=True, order=True)
class Arm:
    """One way to train. SGD is gamma = 1, r_max = 1, where r = 1.

    Args:
        k: groups that the batch is split into; divides 2,048.
        gamma: lower clip of r.
        r_max: upper clip of r.
        lr: learning rate.
    """

    k: int
    gamma: float
    r_max: float
    lr: float

    @property
    def rule(self) -> tuple[int, float, float]:
        """All but the learning rate."""
        return self.k, self.gamma, self.r_max


def sgd(lr: float) -> Arm:
    """Plain SGD."""
    return Arm(GROUPS, 1.0, 1.0, lr)


def printed(lr: float, gamma: float = GAMMA, k: int = GROUPS) -> Arm:
    """VR-SGD with r in [gamma, 1], as equation 9 prints it."""
    return Arm(k, gamma, 1.0, lr)


def widened(lr: float, gamma: float = GAMMA, k: int = GROUPS) -> Arm:
    """VR-SGD with r in [gamma, 1 / gamma], as the paper's text can be read."""
    return Arm(k, gamma, 1 / gamma, lr)


@dataclass(frozen=True)
class Trace:
    """What one arm did.

    Args:
        losses: (S, 101), on the fixed test inputs, before the first step and after each.
        weights: (S, 101, 10), at the same moments.
        r: (S, 100, 10), the factor of each step.
    """

    losses: Tensor
    weights: Tensor
    r: Tensor


class Draws:
    """The batches of each seed, one after another; equal seeds give equal draws.

    Args:
        inputs: how they are drawn.
        seeds: 0 .. seeds - 1.
    """

    def __init__(self, inputs: InputDistribution, seeds: int) -> None:
        self._inputs = inputs
        self._generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
        self.test = self._draw(TEST_INPUTS)

    def batch(self) -> Tensor:
        """The next batch, (S, 2048, 10)."""
        return self._draw(BATCH)

    def _draw(self, number: int) -> Tensor:
        return torch.stack([self._inputs.draw(one, number) for one in self._generators])


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
    r = _each_layer(total, m2, k, gamma, r_max)
    return weights - lrs.unsqueeze(1) * r * total.mT / k, r


def _each_layer(total: Tensor, m2: Tensor, k: int, gamma: float, r_max: float) -> Tensor:
    """`gsnr` of every seed and learning rate: (S, 10, L) to (S, L, 10)."""
    rule = torch.vmap(partial(gsnr, weight=k, gamma=gamma, r_max=r_max))
    r: Tensor = rule(total.mT.flatten(0, 1), m2.mT.flatten(0, 1))
    return r.view(total.mT.shape)


def losses_of(weights: Tensor, test: Tensor) -> Tensor:
    """Mean squared error on the test inputs, (S, T); weights (S, T, 10), `moments` (S, 10, 10)."""
    delta = weights - TRUTH
    return ((delta @ test) * delta).sum(-1)


def train(
    inputs: InputDistribution,
    arms: Iterable[Arm],
    seeds: int,
    steps: int = STEPS,
    advance: Callable[[], None] = lambda: None,
) -> dict[Arm, Trace]:
    """Trains every arm on the same batches.

    Args:
        inputs: how they are drawn.
        arms: what to compare.
        seeds: runs of each arm.
        steps: of each run.
        advance: called after each step, to show progress.
    """
    draws = Draws(inputs, seeds)
    test = moments(draws.test, 1).squeeze(1)
    alike = [list(same) for _, same in groupby(sorted(set(arms)), key=lambda arm: arm.rule)]
    rules = [same[0].rule for same in alike]
    rates = [torch.tensor([arm.lr for arm in same], dtype=torch.float64) for same in alike]
    paths = [[torch.zeros(seeds, len(same), INPUTS, dtype=torch.float64)] for same in alike]
    factors: list[list[Tensor]] = [[] for _ in alike]
    for _ in range(steps):
        batch = draws.batch()
        groups = {k: moments(batch, k) for k in {rule[0] for rule in rules}}
        for (k, gamma, r_max), lrs, path, used in zip(rules, rates, paths, factors, strict=True):
            weights, r = step(path[-1], groups[k], lrs, gamma, r_max)
            path.append(weights)
            used.append(r)
        advance()
    traces = {}
    for same, path, used in zip(alike, paths, factors, strict=True):
        weights, r = torch.stack(path, 2), torch.stack(used, 2)
        for number, arm in enumerate(same):
            own = weights[:, number]
            traces[arm] = Trace(losses_of(own, test), own, r[:, number])
    return traces
