"""Gradients of pipeline stages, whose schedule mixes the backwards of several micro-batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.grad_guard import GradGuard, require_dense
from bigbatch.gradients.gradient_hooks import hands_errors_over
from bigbatch.gradients.protocols import MicroBatchGradients
from bigbatch.gradients.rank_reducer import GroupReducer
from bigbatch.gradients.source import GradientSource

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage


# [Note: pipeline schedules]
# A schedule of torch.distributed.pipelining runs the backwards itself, and each rank has some of
# the model's layers.
# - A parameter's hook runs once for each micro-batch, in their order, whatever the schedule mixes
#   in between: other stages of the rank, or, with zero bubble, the gradients of inputs. So the
#   number of a micro-batch is how often the hook has run.
# - The hooks see gradients of each micro-batch's own loss. At its end the schedule divides `.grad`
#   by their number, unless it has scale_grads=False. StepTotals.reduction finds which.
# - Squared norms and projections are sums over layers, so over ranks. What every rank knows of the
#   micro-batches alike is divided by the number of ranks before it is summed.
class PipelineSource(GradientSource):
    """The stages that this rank has of a pipeline; see [Note: pipeline schedules]."""

    def __init__(self, stages: Sequence["Stage"]) -> None:
        group = stages[0].group or dist.group.WORLD
        assert group is not None
        self._fired: dict[Tensor, int] = {}  # how often the hook of each parameter ran in the step
        self._begun = 0  # micro-batches of the step that the subscribers know of
        modules = nn.ModuleList(stage.submod for stage in stages)
        super().__init__(modules.parameters(), GradGuard(), PipelineReducer(group))

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
        if number == self._begun:
            self._begun += 1
            for subscriber in self._subscribers:
                subscriber.micro_batch(1.0)
        batch = MicroBatchGradients([parameter], [gradient.detach()], number=number)
        for subscriber in self._subscribers:
            subscriber.gradients(batch)

    def require_unchanged(self, caller: str) -> None:
        """Ends the micro-batches of the schedule's step, which reached all parameters or none."""
        if uneven := {n for n in self._fired.values() if n != self._begun}:
            self.restart()
            raise GradientError(
                f"in a step of {self._begun} micro-batches a parameter received {min(uneven)} "
                "gradients: one that not every micro-batch reaches, or that a stage uses in "
                "several places (tied weights); freeze it, or measure without the pipeline"
            )
        for _ in range(self._begun - self.micro_batches):
            for subscriber in self._subscribers:
                subscriber.end()
            self.group_norms.append(None)
        self.micro_batches = self._begun
        if not self.micro_batches:
            super().require_unchanged(caller)


class PipelineReducer(GroupReducer):
    """The ranks of a pipeline, each of which has other layers and the same micro-batches."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(0, 1, [group], stages=dist.get_world_size(group))


def stages_of(model: object) -> "list[Stage]":
    """The pipeline stages that `model` is or lists; SettingError if this rank has others too."""
    import sys

    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return []
    found = list(model) if isinstance(model, list | tuple) else [model]
    if not any(isinstance(stage, module._PipelineStageBase) for stage in found):
        return []
    ranks, count = dist.get_world_size(found[0].group), found[0].num_stages
    if len(found) * ranks != count:
        raise SettingError(
            f"{len(found)} stages of a pipeline of {count} stages on {ranks} ranks: pass a list of "
            "all stages that this rank has"
        )
    return found
