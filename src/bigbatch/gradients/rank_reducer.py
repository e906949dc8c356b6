"""The ranks that share a step, and the shard of the mean gradient that each of them has."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.errors import GradientError

ShardIndices = tuple[Tensor, Tensor]
"""Positions in the flattened shard, and indices among the requested elements; on the CPU.

A shard is a slice of one dimension under fully_shard ([Note: FSDP2's shards] in `fsdp2.py`), and
runs of the flat gradient in DDP's buckets and in ZeRO's partitions.
"""


class GradientShards:
    """The shard of the mean gradient that this rank has: here all of it."""

    layout: int = 0
    """Changes whenever another rank gets a shard."""

    def local_grad(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """This rank's shard of the reduced gradient; `grad` is what it has in `.grad`."""
        return grad

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's shard of a tensor shaped like the full gradient."""
        return full

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices | None:
        """Which of the first `count` elements of a full gradient `local_grad` has; None for all."""
        return None

    def after_scale(self, factor: float) -> None:
        """The gradients were multiplied by `factor`."""


class RankReducer(GradientShards):
    """One process, which has the full gradient of every parameter.

    Args:
        unshared: the error where other ranks exist after all, with `{ranks}` for their number.
        reduces_each_backward: whether a micro-batch is that of all ranks together, and not this
            rank's; its statistics need no communication.
    """

    rank, ranks = 0, 1
    process, processes = 0, 1
    """Of all that share the step: ranks x the processes that compute a rank's gradient together."""
    lockstep = False
    """Whether the ranks must do equally many backwards in a step."""
    replicas = 1
    """How many ranks have the same `local_grad` of every parameter."""

    def __init__(self, unshared: str = "", *, reduces_each_backward: bool = False) -> None:
        self.reduces_each_backward = reduces_each_backward
        self._unshared = unshared

    @property
    def shards(self) -> GradientShards:
        """The shards of the mean gradient in the current step."""
        return self

    def require_shared(self) -> None:
        """Raises GradientError where there are ranks that no engine reduces over."""
        if not self._unshared or not dist.is_available() or not dist.is_initialized():
            return
        if (ranks := dist.get_world_size()) > 1:
            raise GradientError(self._unshared.format(ranks=ranks))

    def model_parameters(self, trained: list[Tensor]) -> list[Tensor]:
        """The model's parameters for those of an optimizer, in which an engine may put others."""
        return trained

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the full gradient, also while the parameter is sharded or empty."""
        return parameter.shape

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the processes, in place."""

    def sum_gradient(self, values: Tensor) -> None:
        """Sums a tensor shaped like a gradient over the ranks, in place."""
        self.all_reduce(values)

    def sum_slices(self, values: Tensor) -> None:
        """Sums `values` over the processes of this rank, in place."""

    def start_all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Begins to sum `values` over the ranks, in place; the call that it returns waits."""
        self.all_reduce(values)
        return lambda: values

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """Sets whether the next backward reduces the gradients; called before its forward."""


class GroupReducer(RankReducer):
    """Ranks whose gradients an engine reduces over process groups.

    Args:
        rank: this rank.
        ranks: number of ranks, which have samples of their own.
        groups: the groups over which the engine reduces; this rank is in each.
        rank_group: the processes that compute this rank's gradient together, if it is not one:
            those of tensor parallelism, or the stages of a pipeline.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        groups: list[dist.ProcessGroup],
        rank_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.ranks = self.process, self.processes = rank, ranks
        self._groups = self._all_groups = groups
        if rank_group is not None:
            size = dist.get_world_size(rank_group)
            self.process = rank * size + dist.get_rank(rank_group)
            self.processes = ranks * size
            self._all_groups = [*groups, rank_group]
        world = dist.get_world_size()
        if self.process == 0 and self.processes < world:
            warnings.warn(
                f"the model is shared by {self.processes} of {world} ranks, and the statistics are "
                "theirs: right where the others train something else. Where they hold other layers "
                "of the model (pipeline parallelism) the statistics cover these layers alone, so "
                "stages would decide differently: pass the stages, GradientMeter(stages)",
                stacklevel=5,
            )

    def all_reduce(self, values: Tensor, groups: list[dist.ProcessGroup] | None = None) -> None:
        """Sums `values` over the processes, in place; one all-reduce per group."""
        try:
            for group in groups or self._all_groups:
                dist.all_reduce(values, group=group)
        except RuntimeError as error:
            note_waiting(error, self.process, self.processes)
            raise

    def sum_gradient(self, values: Tensor) -> None:
        """Sums a tensor shaped like a gradient over the ranks, in place."""
        if self._groups:
            self.all_reduce(values, self._groups)

    def sum_slices(self, values: Tensor) -> None:
        """Sums `values` over the processes of this rank, in place."""
        if self.processes > self.ranks:
            self.all_reduce(values, self._all_groups[-1:])


def indices_in_runs(places: Tensor, runs: Iterable[tuple[int, int]]) -> ShardIndices:
    """Indices for a shard that is a concatenation of runs of the flat gradient."""
    positions, numbers = [places[:0]], [places[:0]]
    offset = 0  # of the run in the shard
    for first, length in runs:
        inside = ((places >= first) & (places < first + length)).nonzero().squeeze(1)
        positions.append(places[inside] - first + offset)
        numbers.append(inside)
        offset += length
    return torch.cat(positions), torch.cat(numbers)


def indices_in_rows(
    count: int, shape: Sequence[int], dim: int, first: int, length: int
) -> ShardIndices:
    """Indices of the first `count` elements, for a shard that is a slice of one dimension."""
    rows = torch.arange(count, device="cpu") // math.prod(shape[dim + 1 :]) % shape[dim]
    numbers = ((rows >= first) & (rows < first + length)).nonzero().squeeze(1)
    return torch.arange(len(numbers), device="cpu"), numbers


def places_in_memory(count: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Positions of the first `count` elements in the memory of a dense tensor."""
    numbers = torch.arange(count, device="cpu")
    places, step = torch.zeros_like(numbers), 1
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim])[::-1]:
        places += numbers // math.prod(shape[dim + 1 :]) % shape[dim] * step
        step *= shape[dim]
    return places


def is_of_network(error: BaseException) -> bool:
    """Whether ranks could not reach each other, as where one of them has ended."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return is_gloo or isinstance(error, dist.DistError)


def note_waiting(error: BaseException, rank: int, ranks: int) -> None:
    """Adds to a network error that this rank waited for others, and the likely reasons."""
    if ranks > 1 and is_of_network(error) and not hasattr(error, "__notes__"):
        error.add_note(
            f"bigbatch: rank {rank} of {ranks} waited here for the others, one of which has failed "
            "(its own error, above or in its log, is the cause), is late (timeout= of "
            "init_process_group is how long to wait), or makes other calls"
        )
