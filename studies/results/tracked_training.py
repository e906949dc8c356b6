"""Trainings that record, with each step's estimate, the exact signal and noise at its weights."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from bigbatch.log.step_record import StepRecord
from bigbatch.policies.controller import Controller
from bigbatch.policies.loss_trend import LossTrend
from bigbatch.policies.policy import Fixed, Policy, TrainingState
from bigbatch.statistics.averages import AdaptiveAverage, NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.datasets import idx_files
from bigbatch_recipes.datasets.in_memory import InMemoryDataset, identity_collate
from bigbatch_recipes.fashion_mnist import FASHION_MNIST
from studies.results.exact_gradients import exact_statistics

FIXED_BATCH = 128
BOUNDS = 32, 1024  # of the batch size under a policy
EVERY = 2  # steps from one exact measurement to the next; their signals correlate by .6
WIDTH = 16  # steps before and after, over which the truth of a step is averaged

_FIRST_BATCH = 64  # under a policy; the learning rate's base batch in every training
_LR, _MOMENTUM, _LAST_LR = 0.02, 0.9, 0.1  # the last rate over the first
_MEAN, _STD = 0.2860, 0.3530  # of the training images
_WIDTH_OF_LAYERS, _CLASSES = 128, 10


@dataclass(frozen=True)
class Samples:
    """A data set in memory: inputs (M, features) in float64, labels (M,)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> "Samples":
        """The first samples, at most `count`."""
        return Samples(self.inputs[:count], self.labels[:count])


def read_samples(data: Path | None) -> Samples:
    """The training images of Fashion-MNIST below `data`; scikit-learn's digits without it.

    Raises:
        RunError: a folder is given, and the files are not in it.
    """
    if data is None:
        datasets: Any = import_module("sklearn.datasets")
        images, classes = datasets.load_digits(return_X_y=True)
        return Samples(torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(classes))
    folder = FASHION_MNIST.origin.find(data)
    assert folder is not None
    pixels, labels = idx_files.read_images(folder, FASHION_MNIST.origin)[0].tensors
    return Samples(((pixels.flatten(1).double() / 255 - _MEAN) / _STD), labels)


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Args:
        policy: decides the batch size.
        micro_batches: k of every step.
        smoothing: of the controller.
        by_groups: whether k groups of one backward take the place of k micro-batches.
    """

    policy: Policy
    micro_batches: int
    smoothing: str | None = "auto"
    by_groups: bool = False

    @property
    def name(self) -> str:
        """The policy, and how a step is measured."""
        way = "groups" if self.by_groups else "micro-batches"
        return f"{type(self.policy).__name__}, {self.micro_batches} {way}"

    def controller(self, *, averages: bool = True) -> Controller:
        """A new controller of the arm; without averages it decides by what it is given."""
        if isinstance(self.policy, Fixed):
            size = self.policy.batch_size
            return Controller(self.policy, size, base_batch=_FIRST_BATCH)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*one step's noise scale")
            return Controller(
                self.policy,
                _FIRST_BATCH,
                min_batch=BOUNDS[0],
                max_batch=BOUNDS[1],
                smoothing=self.smoothing if averages else None,
            )


class Training:
    """A perceptron with two hidden layers, trained by momentum SGD through `AdaptiveBatch`.

    Every step is measured. Weights and gradients are in float64, so that a training with the same
    batch sizes is the same however its steps are cut.

    Args:
        samples: what it trains on, in shuffled passes.
        total: samples after which the cosine schedule has reached a tenth of its rate.
        seed: of the weights and of the order.
        arm: the way to train.
    """

    def __init__(self, samples: Samples, total: int, seed: int, arm: Arm) -> None:
        features = samples.inputs.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = _network(features).double()
        self._total = total
        optimizer: Optimizer = SGD(self.network.parameters(), lr=_LR, momentum=_MOMENTUM)
        loader = DataLoader(
            InMemoryDataset(samples.inputs, samples.labels),
            batch_size=_FIRST_BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=identity_collate,
        )
        self.loop = AdaptiveBatch(
            self.network,
            optimizer,
            loader,
            policy=arm.controller(),
            scheduler=CosineAnnealingLR(
                optimizer, math.ceil((total + BOUNDS[1]) / _FIRST_BATCH), eta_min=_LAST_LR * _LR
            ),
            micro_batch=BOUNDS[1],
            min_micro_batches=None if arm.by_groups else arm.micro_batches,
            groups=arm.micro_batches if arm.by_groups else None,
            every=1,
        )

    def loss_of(self, batch: Sequence[Tensor]) -> Tensor:
        """Mean loss of a batch."""
        inputs, labels = batch
        return cross_entropy(self.network(inputs), labels)

    def states(self) -> Iterator[int]:
        """Trains to the end; the number of steps done, before each step."""
        yield 0
        while True:
            for step in self.loop:
                for batch in step:
                    step.backward(self.loss_of(batch))
                step.update()
                if self.loop.samples >= self._total:
                    return
                yield self.loop.steps

    def exact(self, samples: Samples) -> tuple[GradientStatistics, float]:
        """Exact statistics at the present weights, and the standard error of ln B_simple."""
        return exact_statistics(self.network, samples.inputs, samples.labels)


def _network(features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, _WIDTH_OF_LAYERS),
        nn.ReLU(),
        nn.Linear(_WIDTH_OF_LAYERS, _WIDTH_OF_LAYERS),
        nn.ReLU(),
        nn.Linear(_WIDTH_OF_LAYERS, _CLASSES),
    )


@dataclass(frozen=True)
class Truth:
    """Exact statistics at some steps of a training.

    Args:
        steps: numbers of the steps, increasing.
        statistics: of each.
        errors: standard errors of ln B_simple, nan where unknown.
    """

    steps: list[int]
    statistics: list[GradientStatistics]
    errors: list[float]

    def at_every_step(self, batch_sizes: Sequence[int]) -> list[GradientStatistics]:
        """Signal and noise of every step, between the known ones by straight lines."""
        steps = np.arange(len(batch_sizes))
        signal, noise = (np.interp(steps, self.steps, values) for values in self._columns())
        return [
            GradientStatistics(float(s), float(v), n, n)
            for s, v, n in zip(signal, noise, batch_sizes, strict=True)
        ]

    def _columns(self) -> tuple[list[float], list[float]]:
        return (
            [one.grad_sqnorm for one in self.statistics],
            [one.grad_variance for one in self.statistics],
        )


@dataclass(frozen=True)
class Tracked:
    """A finished training.

    Args:
        arm: the way it trained.
        records: of every step.
        truth: exact statistics at the weights before some of the steps.
    """

    arm: Arm
    records: list[StepRecord]
    truth: Truth

    @property
    def estimates(self) -> list[GradientStatistics]:
        """What each step measured."""
        return [_measured(record) for record in self.records]

    @property
    def batch_sizes(self) -> list[int]:
        """Samples of each step."""
        return [record.batch_size for record in self.records]

    @property
    def decided(self) -> list[int]:
        """The batch size that was decided for each step, before it was rounded."""
        return [record.target_batch_size for record in self.records]

    def exact(self) -> list[GradientStatistics]:
        """Signal and noise at the weights of every step."""
        return self.truth.at_every_step(self.batch_sizes)

    def centered(self) -> list[GradientStatistics]:
        """The truth without delay: exact values averaged over the 16 steps before and after."""
        exact = self.exact()
        return [
            mean_statistics(exact[max(0, n - WIDTH) : n + WIDTH + 1]) for n in range(len(exact))
        ]

    def followed(
        self, statistics: Sequence[GradientStatistics], *, averages: bool = True
    ) -> list[int]:
        """The batch sizes of the same controller if every step had measured these statistics."""
        controller, trend, samples, sizes = (
            self.arm.controller(averages=averages),
            LossTrend(),
            0,
            [],
        )
        for number, (one, record) in enumerate(zip(statistics, self.records, strict=True)):
            size = controller.decision.batch_size
            sizes.append(size)
            samples += size
            now = TrainingState(
                size, size, samples=samples, steps=number + 1, loss_trend=trend.trend
            )
            controller.next(replace(one, samples=size), now)
            trend.add(record.batch_size, record.loss)
        return sizes


def averaged(statistics: Sequence[GradientStatistics], smoothing: str) -> list[GradientStatistics]:
    """What a controller's average is after each step: over 16 steps, or "auto"."""
    average = AdaptiveAverage() if smoothing == "auto" else NoiseAverage(16, "steps")
    return [average.update(one) for one in statistics]


def train_tracked(
    samples: Samples, total: int, seed: int, arm: Arm, truth: Truth | None = None
) -> Tracked:
    """Trains to the end.

    Args:
        samples: training set; the exact statistics are over all of it.
        total: samples to train on, over all passes.
        seed: of weights and order.
        arm: the way to train.
        truth: of another training with the same batch sizes; None to measure it.
    """
    training = Training(samples, total, seed, arm)
    known = Truth([], [], [])
    records = []
    for number in training.states():
        if truth is None and number % EVERY == 0:
            statistics, error = training.exact(samples)
            known.steps.append(number)
            known.statistics.append(statistics)
            known.errors.append(error)
        if training.loop.record is not None:
            records.append(training.loop.record)
    assert training.loop.record is not None
    records.append(training.loop.record)
    return Tracked(arm, records, known if truth is None else truth)


def _measured(record: StepRecord) -> GradientStatistics:
    return record.statistics or GradientStatistics(
        math.nan, math.nan, record.batch_size, record.micro_batches
    )


def mean_statistics(statistics: Sequence[GradientStatistics]) -> GradientStatistics:
    """Averages of signal and noise, a step weighing as much as it has samples."""
    samples = math.fsum(one.samples for one in statistics)
    signal, noise = (
        math.fsum(one.samples * value for one, value in zip(statistics, values, strict=True))
        for values in (
            [one.grad_sqnorm for one in statistics],
            [one.grad_variance for one in statistics],
        )
    )
    return GradientStatistics(signal / samples, noise / samples, 1, 1)
