"""What sources of engines have in common that join ranks and write to `.grad` themselves."""

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.gradients.single_process import SingleProcessSource


class DistributedSource(SingleProcessSource):
    """Gradients that an engine joins over `groups` of ranks.

    The engine writes to `.grad` between and after backwards, so only what stands there at the end
    of a step is checked; and a micro-batch of several backwards is summed here, since a difference
    of `.grad` may hold other ranks' share.
    """

    _engine_writes = True

    def __init__(self, parameters: Iterable[Tensor], groups: list[dist.ProcessGroup]) -> None:
        self._groups = groups
        world = dist.get_world_size()
        if self.rank == 0 and self.ranks < world:
            warnings.warn(
                f"the model is shared by {self.ranks} of {world} ranks, and what is measured is "
                "theirs: right where the others train something else; where they hold other layers "
                "of it (pipeline parallelism) it is of these layers alone, so that stages would "
                "decide differently: measure each by a meter, and add up signals and noises",
                stacklevel=5,
            )
        super().__init__(parameters)

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the ranks, in place; one all-reduce per group."""
        try:
            for group in self._groups:
                dist.all_reduce(values, group=group)
        except RuntimeError as error:
            note_waiting(error, self.rank, self.ranks)
            raise

    def _require_known_ranks(self) -> None:
        """They are."""

    def _start_whole(self) -> dict[Tensor, Tensor | None]:
        return {}

    def _gather_whole(self, parameter: Tensor, gradient: Tensor) -> None:
        assert self._whole is not None
        before = self._whole.get(parameter)
        self._whole[parameter] = gradient.clone() if before is None else before.add_(gradient)

    @torch.no_grad()
    def _emit_whole(self) -> None:
        assert self._whole is not None
        for parameter, gradient in self._whole.items():
            assert gradient is not None
            self._emit(parameter, gradient)
        self._whole = None


def is_of_network(error: BaseException) -> bool:
    """Whether it says that ranks could not reach each other, as where one of them is gone."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return of_gloo or isinstance(error, dist.DistError)


def note_waiting(error: BaseException, rank: int, ranks: int) -> None:
    """Notes on an error of the network that other ranks were waited for, and why in vain."""
    if ranks > 1 and is_of_network(error) and not hasattr(error, "__notes__"):
        error.add_note(
            f"bigbatch: rank {rank} of {ranks} waited here for the others, one of which has failed "
            "(its own error, above or in its log, is the cause), is late (timeout= of "
            "init_process_group is how long to wait), or makes other calls"
        )
