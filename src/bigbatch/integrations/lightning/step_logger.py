"""Writes step records to the loggers of a Lightning trainer."""

import math
import warnings
from typing import Any

from bigbatch.training.step_record import StepRecord


class StepLogger:
    """Writes records as Lightning writes metrics: to its loggers, every n steps.

    A logger that fails gets no more records, with one warning; training continues.
    """

    def __init__(self) -> None:
        self._failed: list[Any] = []

    def append(self, trainer: Any, record: StepRecord) -> None:
        """Writes the record of a step, if it is one of the n-th.

        Args:
            trainer: the trainer with the loggers and `log_every_n_steps`.
            record: the record of the step that has just ended.
        """
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not every or trainer.global_step % every:
            return
        metrics = metrics_of(record)
        for logger in trainer.loggers:
            if any(logger is failed for failed in self._failed):
                continue
            try:  # numbered from 0, as Lightning's own metrics
                logger.log_metrics(metrics, step=trainer.global_step - 1)
            except Exception as error:
                self._failed.append(logger)
                warnings.warn(
                    f"{type(logger).__name__} could not log batch size and noise "
                    f"({type(error).__name__}: {error}); training continues without that",
                    stacklevel=2,
                )


def metrics_of(record: StepRecord) -> dict[str, float]:
    """The metrics of a record by name, without those that are not measured or not finite."""
    metrics = {
        "bigbatch/batch_size": float(record.batch_size),
        "bigbatch/similarity": record.similarity,
        "bigbatch/noise_scale": record.noise_scale,
        "bigbatch/loss": record.loss,
    }
    for group, lr in enumerate(record.lr):
        metrics[f"bigbatch/lr/{group}" if group else "bigbatch/lr"] = lr
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
