"""Collective operations of the ranks of one training, for a single process too."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from bigbatch.errors import BigbatchError

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")


def rank() -> int:
    """Rank of this process; 0 for a single process."""
    return int(_distributed().get_rank()) if _has_group() else 0


def world_size() -> int:
    """Number of ranks; 1 for a single process."""
    return int(_distributed().get_world_size()) if _has_group() else 1


def is_rank_zero() -> bool:
    """Whether this is rank 0, which alone writes and prints."""
    return rank() == 0


def wrap_ddp(model: "nn.Module") -> "nn.Module":
    """The model in DDP if there are several ranks."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model) if world_size() > 1 else model


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """The result of `function` on rank 0, on all ranks; an error is raised on all. Collective."""
    if world_size() == 1:
        return function()
    result: list[Any] = [None, None]
    if is_rank_zero():
        try:
            result[0] = function()
        except (BigbatchError, OSError) as error:
            result[1] = error
    _distributed().broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    value: T = result[0]
    return value


def broadcast_tensors(tensors: "Iterable[Tensor]") -> None:
    """Copies the tensors of rank 0 into those of the other ranks. Collective."""
    if world_size() > 1:
        for tensor in tensors:
            _distributed().broadcast(tensor, 0)


def _distributed() -> Any:
    """`torch.distributed` if it is imported, which takes seconds; a process group needs it."""
    return sys.modules.get("torch.distributed")


def _has_group() -> bool:
    dist = _distributed()
    return dist is not None and dist.is_available() and bool(dist.is_initialized())
