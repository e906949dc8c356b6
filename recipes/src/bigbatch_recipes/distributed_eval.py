"""Evaluation on all ranks: each evaluates its share of the data, and sums are reduced."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, Subset

from bigbatch.errors import SettingError
from bigbatch_recipes.datasets.in_memory import identity_collate
from bigbatch_recipes.process_group import rank, world_size
from bigbatch_recipes.recipe import Batch
from bigbatch_recipes.settings import Settings


def device_of(settings: Settings) -> torch.device:
    """The device of this rank.

    Raises:
        SettingError: the device does not exist.
    """
    if settings.device == "cuda":
        if not torch.cuda.is_available():
            raise SettingError("device='cuda' is not there; write --set device=cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(settings.device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def local_batches(data: Dataset[Any], settings: Settings) -> Iterator[Batch]:
    """Micro-batches of this rank's share of a data set, on its device; each sample is in one."""
    local = Subset(data, range(rank(), len(data), world_size()))  # type: ignore[arg-type]
    generator = torch.Generator()  # a loader draws a number, which must not change training's draws
    loader = DataLoader(
        local,
        settings.micro_batch,
        collate_fn=identity_collate,
        num_workers=settings.workers,
        generator=generator,
    )
    device = device_of(settings)
    for batch in loader:
        yield to_device(batch, device)


def finite_scores(
    model: nn.Module, measure: Callable[[nn.Module], dict[str, float]], device: torch.device
) -> dict[str, float]:
    """The measured scores; nan if an output of the model is not finite. Collective.

    `argmax` of outputs that are nan is 0, which would count as right now and then.
    """
    nonfinite = torch.zeros((), device=device)

    def count_nonfinite(_: nn.Module, __: Any, output: Any) -> None:
        for x in tree_leaves(output):
            nonfinite.add_((~x.isfinite()).sum())

    handle = model.register_forward_hook(count_nonfinite)
    try:
        scores = measure(model)
    finally:
        handle.remove()
    return dict.fromkeys(scores, math.nan) if all_reduce_sum(nonfinite).item() else scores


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in float64. Collective."""
    values = values.detach().double()
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_gather_rows(values: Tensor) -> Tensor:
    """The rows of all ranks, on the CPU, in the order of the ranks. Collective."""
    values = values.detach().cpu()
    if world_size() == 1:
        return values
    rows: list[Any] = [None] * world_size()
    dist.all_gather_object(rows, values)
    return torch.cat(rows)


def accuracy_and_loss(
    model: nn.Module, data: Dataset[Any], settings: Settings
) -> tuple[float, float]:
    """Percentage of samples (x, label) with the largest logit at the label, and mean cross-entropy.

    Collective.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device_of(settings))
    for x, labels in local_batches(data, settings):
        logits = model(x)
        hits = (logits.argmax(-1) == labels).sum()
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([hits.double(), loss.double(), sums.new_tensor(len(labels))])
    hits, loss, samples = all_reduce_sum(sums).tolist()
    return 100 * float(hits) / float(samples), float(loss) / float(samples)
