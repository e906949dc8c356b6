"""Builds the loop of a training: batches, order of the data and ranks, as the settings say."""

import math
import warnings
from functools import cache
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bigbatch.data.batches import Batches
from bigbatch.data.sampler import ElasticDistributedSampler
from bigbatch.policies.controller import Controller
from bigbatch.policies.lr_scaling import LRScaling
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.datasets.in_memory import identity_collate
from bigbatch_recipes.datasets.subset import Subset, chosen_indices
from bigbatch_recipes.process_group import world_size
from bigbatch_recipes.recipe import Data
from bigbatch_recipes.settings import Settings


def build_loop(
    data: Data,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    controller: Controller,
    scaler: GradScaler | None,
) -> AdaptiveBatch:
    """The loop of the settings over a data set."""
    return AdaptiveBatch(
        model,
        optimizer,
        Batches(
            _loader(data, settings),
            remainder=settings.remainder,
            virtual_ranks=_virtual_ranks(settings),
        ),
        policy=controller,
        micro_batch=settings.micro_batch,
        fixed_micro_batch=settings.fixed_micro_batch,
        min_micro_batches=settings.min_micro_batches,
        groups=settings.groups,
        lr_scaling=lr_scaling_of(settings),
        transport=settings.transport,
        **({"budget": settings.budget} if settings.every is None else {"every": settings.every}),
        meter=GradientMeter(
            model,
            confidence=None if settings.smoothing else settings.confidence,
            per_layer=settings.per_layer,
            half_batch_cosine=settings.half_batch_cosine,
        ),
        scaler=scaler,
    )


def lr_scaling_of(settings: Settings) -> LRScaling:
    """The rule that scales lr with the batch size; None for none."""
    return None if settings.lr_scaling == "none" else settings.lr_scaling


def _loader(data: Data, settings: Settings) -> DataLoader[Any]:
    dataset, samples = data.train, len(data.train)  # type: ignore[arg-type]
    if 0 < settings.samples < samples:
        dataset = Subset(dataset, chosen_indices(samples, settings.samples))
    return DataLoader(
        dataset,
        min(settings.base_batch, settings.micro_batch),
        sampler=ElasticDistributedSampler(dataset, seed=settings.seed),  # type: ignore[arg-type]
        collate_fn=identity_collate,
        num_workers=settings.workers,
    )


def _virtual_ranks(settings: Settings) -> int:
    """`virtual_ranks`, or its smallest multiple that the number of ranks divides."""
    needed = math.lcm(settings.virtual_ranks, world_size())
    if needed != settings.virtual_ranks:
        _warn_of_groups(settings.virtual_ranks, world_size(), needed)
    return needed


@cache
def _warn_of_groups(given: int, ranks: int, needed: int) -> None:
    """Warns once per process, not for each training of a study."""
    warnings.warn(
        f"virtual_ranks={given} is no multiple of the {ranks} ranks, so {needed} are used: other "
        "groups of samples, and another run, than on fewer ranks",
        stacklevel=4,
    )
