"""Gradients under DistributedDataParallel: leaf hooks see each rank's own, `.grad` is the mean."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import SettingError
from bigbatch.gradients.float32_sums import is_half
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.rank_reducer import GradientShards, GroupReducer, note_waiting
from bigbatch.gradients.source import GradientSource


class ReducedShards(GradientShards, ABC):
    """State of a communication hook that keeps the mean in shards, and may put r g in `.grad`."""

    unreduced: bool = False
    """Whether the next reduction must leave each rank its own gradient."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `.grad` of the current step holds something else than the mean."""


class DDPReducer(GroupReducer):
    """Reads the mean gradient under DDP; the last backward of a step has to reduce."""

    def __init__(
        self, ddp: DistributedDataParallel, rank_group: dist.ProcessGroup | None = None
    ) -> None:
        group = ddp.process_group
        super().__init__(dist.get_rank(group), dist.get_world_size(group), [group], rank_group)
        self.ddp = ddp

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """All ranks have the full mean, unless a communication hook keeps shards of it."""
        return self.ranks if self.shards is self else 1

    @property
    def shards(self) -> GradientShards:
        """The shards that a communication hook keeps in this step; else the full gradient."""
        state = self._hook_state
        return state if state is not None and state.done else self

    def start_all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Begins to sum `values` over the ranks, in place; the call that it returns waits."""
        work = dist.all_reduce(values, group=self.ddp.process_group, async_op=True)

        def summed() -> Tensor:
            try:
                work.wait()
            except RuntimeError as error:
                note_waiting(error, self.rank, self.ranks)
                raise
            return values

        return summed

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """Does what `no_sync` does: DDP reads it in the forward, so it is set before that.

        The first backward ever of a static graph has to be reduced. The mean of a gradient that is
        reduced before the others is the same mean; a hook that needs the sum leaves it alone.
        """
        first = self.ddp.static_graph and not self.ddp._static_graph_delay_allreduce_enqueued
        self.ddp.require_backward_grad_sync = requires_sync or first
        if (hook_state := self._hook_state) is not None:
            hook_state.unreduced = first and not requires_sync

    @property
    def _hook_state(self) -> ReducedShards | None:
        """The state of the model's communication hook, if it keeps the mean gradient."""
        states = (state for _, state in self.ddp._comm_hooks)
        return next((state for state in states if isinstance(state, ReducedShards)), None)


class DDPSource(GradientSource):
    """DDP's group; `.grad` is this rank's sum until the last backward."""

    keeps_sums = True
    float32_refusal = ""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        parameters: Iterable[Tensor],
        reducer: DDPReducer | None = None,
    ) -> None:
        parameters = list(parameters)
        require_wrapped(ddp, parameters)
        super().__init__(parameters, GradGuard(), reducer or DDPReducer(ddp))

    def _sum_of(self, parameter: Tensor) -> Tensor | None:
        if self.float32_sums is not None and is_half(parameter):
            return self.float32_sums.of(parameter)
        grad = parameter.grad
        return None if grad is None else grad.detach()


def require_wrapped(ddp: DistributedDataParallel, parameters: Iterable[Tensor]) -> None:
    """Raises SettingError where DDP does not reduce the gradient of one of the parameters."""
    named = ddp.module.named_parameters()
    wrapped = {p for name, p in named if name not in ddp.parameters_to_ignore}
    if any(p.requires_grad and p not in wrapped for p in parameters):
        raise SettingError(
            "a parameter stands outside the DDP wrapper, or DDP ignores it, so no rank shares it"
        )
