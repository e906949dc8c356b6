"""The parts of a training that its steps work with, and what its optimizer has to be."""

import operator
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import SettingError
from bigbatch.gradients.gradient_hooks import weak_method
from bigbatch.optim.composite import ContainerOfOptimizers, one_optimizer
from bigbatch.optim.optimizer_settings import parts_of, required_argument
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.statistics.consecutive_steps import ConsecutiveSteps
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.loss_check import LossCheck
from bigbatch.training.oom_hints import OomHints

_FUSED = operator.methodcaller("get", "fused")
_SKIPPING = {SGD, Adagrad, Adam, AdamW}  # their fused step reads `found_inf`


class TrainingParts:
    """Meter, optimizer, scaler and ranks of a training; what warns of a step's mistakes."""

    def __init__(self, meter: GradientMeter, optimizer: Optimizer) -> None:
        self.meter, self.scaler, self.optimizer = meter, meter.scaler, optimizer
        self.reader = micro_batch_optimizer(optimizer)  # if it reads each micro-batch's gradient
        # its own source, if each backward is reduced over the ranks
        self.reduced = None if self.reader is None else self.reader.reduced_source()
        self.collectives = collectives = HostCollectives(meter.source)
        self.oom_hints = OomHints(collectives.process, collectives.processes)
        self.warns = collectives.process == 0  # whether this process warns
        self.loss_check = LossCheck(warns=self.warns)
        self.pairs: ConsecutiveSteps | None = None  # if steps of one backward are compared
        self.compares = False  # whether the present step is one of a pair
        self.optimizer_steps = 0  # calls of optimizer.step(), by anybody
        # whose own step() may do more than step its optimizers
        self._steps_by_container = isinstance(optimizer, ContainerOfOptimizers)
        self.stepping = parts_of(optimizer)  # the optimizers that one step() steps
        for part in self.stepping:
            # `Optimizer.__init__` does this once for each class; a wrapper may not call it, as
            # timm's Lookahead, and would never call its hooks
            if not getattr(type(part).step, "hooked", False):
                part._patch_step_function()  # torch's own; also after unpickling
            part.register_step_post_hook(weak_method(self._count_optimizer_step))

    @property
    def skips_on_device(self) -> bool:
        """Whether `optimizer.step()` leaves all as it is where `found_inf` is 1.

        A fused step of torch's own does. Its first one makes the buffers, and torch leaves the
        momentum of SGD uninitialised if that one is skipped; so they have to be there.
        """
        has_engine = self.meter.source.engine is not None
        if self.scaler is not None or self._steps_by_container or has_engine:
            return False
        for optimizer in self.stepping:
            if type(optimizer) not in _SKIPPING:
                return False
            groups = optimizer.param_groups
            if not all(map(_FUSED, groups)):
                return False
            if type(optimizer) is SGD and not any(group["momentum"] for group in groups):
                continue
            if len(optimizer.state) != sum(len(group["params"]) for group in groups):
                return False
        return True

    @property
    def has_unscaled_part(self) -> bool:
        """Whether a GradScaler has unscaled a part of the optimizer by itself in this step."""
        # a scaler that is not enabled has none
        unscaled = getattr(self.scaler, "_per_optimizer_states", {})
        parts = [*self.stepping, getattr(self.optimizer, "container", self.optimizer)]
        return any(id(part) in unscaled for part in parts if part is not self.optimizer)

    def zero_grad(self) -> None:
        """Zeroes the gradients and forgets the micro-batches of an unfinished step."""
        self.meter.source.zero_grad()
        if self.reduced is not None:
            self.reduced.restart()

    def _count_optimizer_step(self, *_: Any) -> None:
        self.optimizer_steps += 1


def steppable(optimizer: Any) -> Any:
    """The optimizer, or a container as one.

    Raises SettingError unless one `step()` is an update, and calls hooks.
    """
    optimizer = one_optimizer(optimizer)
    for part in parts_of(optimizer):
        if not isinstance(getattr(part, "_optimizer_step_post_hooks", None), OrderedDict):
            raise SettingError(_refusal_of_wrapper(part))
        if argument := required_argument(part):
            raise SettingError(
                f"{type(part).__name__}.step() needs a {argument}, and an update is one step() "
                "without; use an optimizer that needs none"
            )
    return optimizer


def _refusal_of_wrapper(optimizer: Any) -> str:
    """Why an optimizer without torch's hooks is refused, and what to use."""
    name, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if package == "torchft":
        return (
            f"torchft's {name} decides inside step() whether a step counts, and its replicas come "
            "and go outside torch.distributed, so that each would decide a batch of its own; use "
            "the loop of examples/torchft, in which all of them measure and decide together"
        )
    return (
        f"{name} is a wrapper that no hook can be put on, and the optimizer inside it alone would "
        "lose what it adds (privacy, averages); use it in a loop of your own, which a "
        "GradientMeter can measure. For one that accelerate prepared, use "
        "bigbatch.integrations.accelerate.adaptive_batch, or pass the optimizer inside it"
    )


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
