"""The time of a step: measured in a plain loop here, and modelled on a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bigbatch.advisor.cluster_time import Network
from bigbatch.policies.step_time import StepTime, TimedSize
from bigbatch_recipes.build_loop import build_optimizer
from bigbatch_recipes.recipe import Recipe
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.train_run import hold_out
from studies.timing import interleaved

_ROUNDS = 15


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of a plain loop, and bytes of its gradient.

    Args:
        fixed: seconds that do not depend on the batch.
        per_sample: seconds of one sample more.
        gradient_bytes: bytes of an all-reduce.
    """

    fixed: float
    per_sample: float
    gradient_bytes: int

    def seconds(self, steps: float, samples: float, devices: int) -> float:
        """Seconds of so many steps over so many samples on devices like this one.

            steps (fixed + all_reduce(devices)) + samples per_sample / devices

        The all-reduce takes 12.5 GB/s and 30 us a message; nothing overlaps it.
        """
        all_reduce = Network().all_reduce_seconds(self.gradient_bytes, devices)
        return steps * (self.fixed + all_reduce) + samples * self.per_sample / devices

    def overhead(self, devices: int) -> float:
        """B_0: samples of a step that take as long as its fixed part."""
        return self.seconds(1, 0, devices) / self.seconds(0, 1, devices)


def measure_step_cost(recipe: Recipe, settings: Settings, sizes: Sequence[int]) -> StepCost:
    """Times steps of a plain loop over the recipe's data: batches of these sizes, 15 steps each."""
    torch.manual_seed(0)
    torch.set_num_threads(settings.threads)
    data, model = hold_out(recipe.data(settings), settings), recipe.model(settings)
    optimizer = build_optimizer(settings, model.named_parameters())
    loss_of = recipe.loss(settings)
    samples = data.train.__getitems__(list(range(max(sizes))))  # type: ignore[attr-defined]

    def step(size: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, tuple(column[:size] for column in samples))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    rows = interleaved([partial(step, size) for size in sizes], _ROUNDS)
    walls = [[times.wall for times in column] for column in zip(*rows, strict=True)]
    timed = [TimedSize(n, median(wall), _ROUNDS) for n, wall in zip(sizes, walls, strict=True)]
    fitted = StepTime.fit(timed)
    assert fitted is not None
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return StepCost(fitted.fixed, fitted.per_sample, bytes_)
