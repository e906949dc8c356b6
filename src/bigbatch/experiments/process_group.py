"""What the ranks of one training do together; a process that is alone does it by itself."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import BigbatchError

T = TypeVar("T")


def rank() -> int:
    """Which one this process is."""
    return dist.get_rank() if _together() else 0


def world_size() -> int:
    """How many there are."""
    return dist.get_world_size() if _together() else 1


def is_rank_zero() -> bool:
    """Whether this is the one that writes and is heard: rank 0."""
    return rank() == 0


def wrap_ddp(model: nn.Module) -> nn.Module:
    """The model, wrapped so that its gradients are those of all ranks."""
    return DistributedDataParallel(model) if world_size() > 1 else model


def run_on_rank_zero(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, for all; an error there is raised on all. Collective."""
    if world_size() == 1:
        return make()
    result: list[Any] = [None, None]
    if is_rank_zero():
        try:
            result[0] = make()
        except (BigbatchError, OSError) as error:
            result[1] = error
    dist.broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    value: T = result[0]
    return value


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Fills the tensors with those of rank 0. Collective."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
