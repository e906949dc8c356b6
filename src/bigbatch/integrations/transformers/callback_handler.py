"""Callbacks of the Trainer: what it knows of a run's length, and reporters that may fail."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from bigbatch.errors import LoopError
from bigbatch.training.adaptive_batch import AdaptiveBatch

_REPORTERS = tuple(INTEGRATION_TO_CALLBACK.values())


class Length(TrainerCallback):
    """Tells the Trainer's state where the run stands by samples; comes before other callbacks.

    `epoch` is the samples done over those of a pass; in the first pass over data of unknown length
    the share of `max_steps`, as the Trainer has it. `max_steps`, which ends a training, is counted
    again from the samples that are left, unless it was asked for, and progress bars with it.

    Args:
        training: gives what trains.
        handler: the Trainer's, with all callbacks.
    """

    def __init__(self, training: Callable[[], AdaptiveBatch], handler: CallbackHandler) -> None:
        self._training, self._handler = training, handler

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Before the Trainer decides whether this was the last step."""
        train = self._training()
        samples = train.batches.samples
        if samples is None:
            if not train.epoch:
                state.epoch = state.global_step / args.max_steps
            return
        state.epoch = train.samples / samples
        if args.max_steps <= 0:
            left = math.ceil(args.num_train_epochs * samples) - train.samples
            steps = math.ceil(left / train.plan.batch_size)
            state.max_steps = state.global_step + max(0, steps)
            self._lengthen_bars(state.max_steps)
        else:
            state.num_train_epochs = math.ceil(
                (train.samples + (args.max_steps - state.global_step) * train.plan.batch_size)
                / samples
            )

    def _lengthen_bars(self, steps: int) -> None:
        for callback in self._handler.callbacks:
            for name in ("training_bar", "training_tracker"):  # of a terminal, of a notebook
                bar = getattr(callback, name, None)
                if bar is not None:
                    bar.total = steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raises LoopError where a callback has ended the epoch within its pass."""
        stopped = control.should_epoch_stop and not control.should_training_stop
        if stopped and self._training().batches.open:
            raise LoopError(
                "a callback set control.should_epoch_stop within a pass over the data, whose other "
                "samples would come in the next epoch; set should_training_stop, or leave it out"
            )


class SafeCallbackHandler(CallbackHandler):
    """The Trainer's callbacks, where a reporter that fails stops no training.

    An exception of TensorBoard's, W&B's, MLflow's or another reporter's callback is said once; the
    callback is called again all the same. Those of other callbacks are raised.

    Args:
        handler: whose callbacks and objects these are.
    """

    def __init__(self, handler: Any) -> None:
        super().__init__(
            handler.callbacks,
            handler.model,
            handler.processing_class,
            handler.optimizer,
            handler.lr_scheduler,
        )
        self._said: set[str] = set()

    def call_event(self, event: str, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """As the Trainer's own, one callback after the other."""
        for callback in list(self.callbacks):
            alone = copy.copy(self)
            alone.callbacks = [callback]
            call = super(SafeCallbackHandler, alone).call_event
            try:
                control = call(event, args, state, control, **others)
            except Exception as error:
                if not isinstance(callback, _REPORTERS):
                    raise
                self._say(type(callback).__name__, event, error)
        return control

    def _say(self, name: str, event: str, error: Exception) -> None:
        if name not in self._said:
            warnings.warn(
                f"{name}.{event} failed, and training continues without: "
                f"{type(error).__name__}: {error}",
                stacklevel=4,
            )
        self._said.add(name)
