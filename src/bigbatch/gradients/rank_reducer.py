"""How the gradients of ranks are reduced, and which part of the mean each rank has."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.gradients.shard_indices import ShardIndices


class RankReducer:
    """One process, which has everything.

    Args:
        unshared: what to say where there are other ranks after all, `{ranks}` being their number.
    """

    rank, ranks = 0, 1
    lockstep = False
    """Whether the ranks must do equally many backwards in a step."""
    reduces_each_backward = False
    """Whether a micro-batch is that of all ranks together, and not this rank's."""

    def __init__(self, unshared: str = "") -> None:
        self.unshared = unshared

    @property
    def replicas(self) -> int:
        """How many ranks have the same `local` part of every gradient."""
        return 1

    @property
    def layout(self) -> int:
        """Changes whenever another rank gets a shard."""
        return 0

    def model_parameters(self, trained: list[Tensor]) -> list[Tensor]:
        """The parameters of the model that an optimizer trains, which may hold others for them."""
        return trained

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the whole gradient, also where the parameter is not whole at present."""
        return parameter.shape

    def local(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """This rank's part of the reduced gradient, given what it holds of `.grad`."""
        return grad

    def shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a tensor shaped like the whole gradient."""
        return whole

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a whole gradient `local` holds."""
        return torch.arange(count, device="cpu"), torch.arange(count, device="cpu")

    def scaled(self, factor: float) -> None:
        """The gradients were multiplied."""

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the ranks, in place."""

    def synchronize(self, now: bool) -> None:
        """Whether the next backward reduces the gradients; called before its forward."""


class GroupReducer(RankReducer):
    """Ranks that an engine reduces over some groups.

    Args:
        rank, ranks: of this process among those that share the step.
        groups: an all-reduce over each of them in turn is one over all of these ranks.
    """

    def __init__(self, rank: int, ranks: int, groups: list[dist.ProcessGroup]) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self._groups = groups
        world = dist.get_world_size()
        if rank == 0 and ranks < world:
            warnings.warn(
                f"the model is shared by {ranks} of {world} ranks, and the statistics are theirs: "
                "right where the others train something else. Where they hold other layers of the "
                "model (pipeline parallelism) the statistics cover these layers alone, so stages "
                "would decide differently: give each stage a meter, and add up grad_sqnorm and "
                "grad_variance",
                stacklevel=5,
            )

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the ranks, in place; one all-reduce per group."""
        try:
            for group in self._groups:
                dist.all_reduce(values, group=group)
        except RuntimeError as error:
            note_waiting(error, self.rank, self.ranks)
            raise


def is_of_network(error: BaseException) -> bool:
    """Whether ranks could not reach each other, as where one of them has ended."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return of_gloo or isinstance(error, dist.DistError)


def note_waiting(error: BaseException, rank: int, ranks: int) -> None:
    """Adds to a network error that this rank waited for others, and the likely reasons."""
    if ranks > 1 and is_of_network(error) and not hasattr(error, "__notes__"):
        error.add_note(
            f"bigbatch: rank {rank} of {ranks} waited here for the others, one of which has failed "
            "(its own error, above or in its log, is the cause), is late (timeout= of "
            "init_process_group is how long to wait), or makes other calls"
        )
