"""DeepSpeed's engine in the loop of a trainer that calls it in every micro-batch."""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from bigbatch.gradients.protocols import Engine
from bigbatch.integrations.external_loop import ExternalLoop


class LoopEngine(DeepSpeedEngine):
    """An engine whose `backward` and `step` are those of the current step of a loop.

    `adapt` makes it of an engine in place, `restore` makes it DeepSpeed's own again.
    """

    _steps: Engine
    _loop: ExternalLoop

    @classmethod
    def adapt(cls, engine: DeepSpeedEngine, loop: ExternalLoop) -> None:
        """Specialises an engine in place."""
        engine.__class__ = cls
        engine._steps, engine._loop = loop.train.meter.source.engine, loop

    def restore(self) -> None:
        """Makes the engine DeepSpeed's own again."""
        del self._steps, self._loop
        self.__class__ = DeepSpeedEngine

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward of a loss that the loop has weighted."""
        self._steps.backward(loss)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Steps the optimizer if the micro-batch was the last of its step."""
        step = self._loop.step
        if step.complete:
            with step.optimizer_step() as finite:
                step.step_optimizer(finite)
