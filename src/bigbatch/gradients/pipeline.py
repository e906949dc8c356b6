"""Gradients of pipeline stages, whose schedule mixes the backwards of several micro-batches."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.ddp import DDPReducer
from bigbatch.gradients.grad_guard import GradGuard, require_dense
from bigbatch.gradients.gradient_hooks import hands_errors_over
from bigbatch.gradients.protocols import MicroBatchGradients
from bigbatch.gradients.rank_reducer import GroupReducer
from bigbatch.gradients.source import GradientSource


class PipelineStage(Protocol):
    """What is read of a stage of torch.distributed.pipelining."""

    submod: nn.Module
    group: dist.ProcessGroup | None
    num_stages: int


# [Note: pipeline schedules]
# A schedule of torch.distributed.pipelining runs the backwards itself, and each rank has some of
# the model's layers.
# - A parameter's hook runs once for each micro-batch, in their order, whatever the schedule mixes
#   in between: other stages of the rank, or, with zero bubble, the gradients of inputs. So the
#   number of a micro-batch is how often the hook has run.
# - The hooks see gradients of each micro-batch's own loss. At its end the schedule divides `.grad`
#   by their number, unless it has scale_grads=False. StepTotals.reduction finds which.
# - The processes of a pipeline are one rank, as those of a tensor-parallel group are: squared norms
#   and projections are sums over layers, so over processes, and what all of them know is added by
#   the first one. [Note: Tensor parallelism]
class MixedBackwards(GradientSource):
    """Sees several micro-batches at a time; mixed into a source. [Note: pipeline schedules]."""

    mixes = True

    def __init__(self, *arguments: Any) -> None:
        self._fired: dict[Tensor, int] = {}  # how often the hook of each parameter ran in the step
        self._begun = 0  # micro-batches of the step that the subscribers know of
        super().__init__(*arguments)

    def _restart(self) -> None:
        super()._restart()
        self._fired.clear()
        self._begun = 0

    @hands_errors_over
    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if not self._step_begun:
            self._begin_step()
        require_dense([gradient])
        number = self._fired.get(parameter, 0)
        self._fired[parameter] = number + 1
        is_first = number == self._begun
        self._begun += is_first
        batch = MicroBatchGradients([parameter], [gradient.detach()])
        for subscriber in self._subscribers:
            subscriber.number = number
            if is_first:
                subscriber.micro_batch(1.0)
            subscriber.gradients(batch)

    def micro_batch(
        self, weight: float = 1.0, *, several_backwards: bool = False
    ) -> AbstractContextManager[None]:
        """Raises GradientError: the schedule says what a micro-batch is."""
        raise GradientError(
            "the schedule of a pipeline runs the backwards; leave micro_batch() out"
        )

    def require_unchanged(self, caller: str) -> None:
        """Ends the micro-batches of the schedule's step, which reached all parameters or none."""
        if uneven := {n for n in self._fired.values() if n != self._begun}:
            raise GradientError(
                f"in a step of {self._begun} micro-batches a parameter received {min(uneven)} "
                "gradients; one that not every micro-batch reaches cannot be measured in a "
                "pipeline: freeze it, or let all micro-batches reach it"
            )
        while self.micro_batches < self._begun:
            for subscriber in self._subscribers:
                subscriber.number = self.micro_batches
                subscriber.end()
            self.micro_batches += 1
            self.group_norms.append(None)
        if not self.micro_batches:
            super().require_unchanged(caller)


class PipelineSource(MixedBackwards):
    """The stages of a rank, plain or each in DistributedDataParallel."""

    def __init__(
        self,
        stages: nn.Module,
        wrappers: Sequence[DistributedDataParallel],
        pipeline: dist.ProcessGroup,
    ) -> None:
        parameters = list(stages.parameters())
        wrapped = {parameter for wrapper in wrappers for parameter in wrapper.parameters()}
        if wrapped and len(wrapped) < len(parameters):
            raise SettingError("of this rank's stages only some are in DDP; wrap all of them")
        reducer = DDPReducer(wrappers[0], pipeline) if wrappers else None
        super().__init__(parameters, GradGuard(), reducer or GroupReducer(0, 1, [], pipeline))


def is_stage(value: object) -> bool:
    """Whether a value is a stage of a pipeline, which is not imported for models without."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return module is not None and isinstance(value, module._PipelineStageBase)


def whole_pipeline(stages: Sequence[PipelineStage]) -> tuple[nn.Module, dist.ProcessGroup]:
    """The modules of a rank's stages, and the ranks of their pipeline.

    Raises:
        SettingError: the rank has other stages too, or a value is no stage.
    """
    if not all(map(is_stage, stages)):
        raise SettingError("a list has pipeline stages and other values; pass the stages alone")
    group = stages[0].group or dist.group.WORLD
    assert group is not None
    ranks, count = dist.get_world_size(group), stages[0].num_stages
    if len(stages) * ranks != count:
        raise SettingError(
            f"{len(stages)} stages of a pipeline of {count} stages on {ranks} ranks: pass a list "
            "of all stages that this rank has"
        )
    return nn.ModuleList(stage.submod for stage in stages), group
