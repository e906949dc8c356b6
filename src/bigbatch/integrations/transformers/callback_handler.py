"""Callbacks of the Trainer: the length of a run in samples, and reporters that may fail."""

import copy
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from bigbatch.errors import LoopError
from bigbatch.training.adaptive_batch import AdaptiveBatch

_REPORTERS = tuple(INTEGRATION_TO_CALLBACK.values())


class Length(TrainerCallback):
    """Sets progress and length in the Trainer's state by samples; runs before other callbacks.

    `epoch` is samples used / samples of a pass; in the first pass over data of unknown length the
    share of `max_steps`, as in the Trainer. `max_steps`, which ends a training, is computed again
    from the remaining samples, unless the user set it, and so is the length of progress bars.
    Intervals below 1 (`eval_steps=0.25`) are then shares of all samples.
    """

    def __init__(self, training: Callable[[], AdaptiveBatch], handler: CallbackHandler) -> None:
        self._training, self._handler = training, handler

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the state before the Trainer decides whether this was the last step."""
        train = self._training()
        samples = train.batches.samples
        if samples is None:
            if not train.epoch:
                state.epoch = state.global_step / args.max_steps
            return
        state.epoch = train.samples / samples
        if args.max_steps <= 0:
            total = math.ceil(args.num_train_epochs * samples)
            steps = math.ceil((total - train.samples) / train.plan.batch_size)
            state.max_steps = state.global_step + max(0, steps)
            self._set_bars(state.max_steps)
            self._set_intervals(args, state, total)
        else:
            state.num_train_epochs = math.ceil(
                (train.samples + (args.max_steps - state.global_step) * train.plan.batch_size)
                / samples
            )

    def _set_intervals(self, args: Any, state: Any, total: int) -> None:
        """Makes those that are a share of the samples divide the number of the update, or not."""
        record = self._training().record
        assert record is not None
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = total * Fraction(str(getattr(args, name) or 0))  # exact: .3 is 3 x .1
            if 0 < interval < total:
                before = record.samples - record.batch_size
                is_due = record.samples // interval > before // interval
                setattr(state, name, state.global_step + (not is_due))

    def _set_bars(self, steps: int) -> None:
        for callback in self._handler.callbacks:
            for name in ("training_bar", "training_tracker"):  # in a terminal, in a notebook
                bar = getattr(callback, name, None)
                if bar is not None:
                    bar.total = steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises LoopError if a callback ends the epoch within a pass over the data."""
        stopped = control.should_epoch_stop and not control.should_training_stop
        if stopped and self._training().batches.open:
            raise LoopError(
                "a callback set control.should_epoch_stop within a pass over the data, whose other "
                "samples would come in the next epoch; set should_training_stop, or remove it"
            )


class SafeCallbackHandler(CallbackHandler):
    """The Trainer's callback handler, in which a failing reporter does not stop the training.

    An exception in the callback of TensorBoard, W&B, MLflow or another reporter is a warning, once;
    later events still call the callback. Exceptions of other callbacks are raised.
    """

    def __init__(self, handler: CallbackHandler) -> None:
        self.__dict__.update(vars(handler))
        self._failed: set[str] = set()  # names of reporters

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Calls one callback after the other, as the Trainer's handler does."""
        for callback in list(self.callbacks):
            handler = copy.copy(self)
            handler.callbacks = [callback]
            call = super(SafeCallbackHandler, handler).call_event
            try:
                control = call(event, args, state, control, **kwargs)
            except Exception as error:
                if not isinstance(callback, _REPORTERS):
                    raise
                name = type(callback).__name__
                if name not in self._failed:
                    warnings.warn(
                        f"{name}.{event} failed, and training continues without: "
                        f"{type(error).__name__}: {error}",
                        stacklevel=3,
                    )
                self._failed.add(name)
        return control
