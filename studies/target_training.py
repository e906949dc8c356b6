"""Trains a workload until its held-out loss is at the target, at any batch size and rate."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import mean

import torch

from studies.advice_workloads import Workload

_EVERY = 1.03  # evaluations are at steps that grow by this factor, or by one step
_SMOOTHED = 5  # the loss is the mean of so many evaluations

TARGET, CAP, GIVEN_UP, DIVERGED = "target", "cap", "given up", "diverged"  # ends of a training


@dataclass(frozen=True)
class Result:
    """What one training came to.

    Args:
        rate: learning rate.
        seed: of the weights and of the drawn samples.
        steps: steps that were trained: to the target, if that is how it ended.
        end: the target; the cap of the workload; given up before that; or a loss that is not
            finite.
    """

    rate: float
    seed: int
    steps: int
    end: str


class TargetTraining:
    """A network in training.

    Args:
        workload: data, network and optimizer.
        rate: learning rate, constant.
        seed: of the weights and of the drawn samples.
    """

    def __init__(self, workload: Workload, rate: float, seed: int) -> None:
        self.workload = workload
        self._rate, self._seed = rate, seed
        self._samples, self._held_out = workload.data()
        self._generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = workload.network()
        self.optimizer = workload.optimizer(self.model.parameters(), rate)

    def step(self, batch_size: int) -> None:
        """One optimizer step on samples that are drawn with replacement."""
        count = len(self._samples[0])
        indices = torch.randint(count, (batch_size,), generator=self._generator)
        batch = tuple(column[indices] for column in self._samples)
        self.optimizer.zero_grad()
        self.workload.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def held_out_loss(self) -> float:
        """Mean loss of the held-out samples."""
        with torch.no_grad():
            return self.workload.loss(self.model, self._held_out).item()

    def to_target(self, batch_size: int, limit: int | None = None) -> Result:
        """Trains until the mean of the last evaluations is at or below the target.

        Args:
            batch_size: samples of a step.
            limit: steps after which the training is given up; the workload's where it is smaller.
        """
        cap = self.workload.step_limit(batch_size)
        last = cap if limit is None else min(limit, cap)
        losses: deque[float] = deque(maxlen=_SMOOTHED)
        due = 1
        for steps in range(1, last + 1):
            self.step(batch_size)
            if steps < due:
                continue
            due = max(steps + 1, math.ceil(_EVERY * steps))
            losses.append(self.held_out_loss())
            if not math.isfinite(losses[-1]):
                return Result(self._rate, self._seed, steps, DIVERGED)
            if len(losses) == _SMOOTHED and mean(losses) <= self.workload.target:
                return Result(self._rate, self._seed, steps, TARGET)
        return Result(self._rate, self._seed, last, CAP if last == cap else GIVEN_UP)
