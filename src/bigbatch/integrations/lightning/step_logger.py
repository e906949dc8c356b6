"""Writes step records to the loggers of a Lightning trainer."""

import math
import warnings
from typing import Any

from bigbatch.log.step_record import StepRecord
from bigbatch.statistics.noise_scale import GradientStatistics


class StepLogger:
    """Writes records as Lightning writes metrics: to its loggers, every n steps.

    A logger that fails gets no more records, with one warning; training continues.
    """

    def __init__(self) -> None:
        self._failed: list[Any] = []
        self._statistics: GradientStatistics | None = None  # measured since the last write

    def append(self, trainer: Any, record: StepRecord) -> None:
        """Writes the record of a step, if it is one of the n-th.

        Args:
            trainer: the trainer with the loggers and `log_every_n_steps`.
            record: the record of the step that has just ended.
        """
        self._statistics = record.statistics or self._statistics
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not every or trainer.global_step % every:
            return
        metrics, self._statistics = metrics_of(record, self._statistics), None
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


def metrics_of(record: StepRecord, statistics: GradientStatistics | None) -> dict[str, float]:
    """Metrics of a step, and statistics of it or an earlier one; without those not finite."""
    metrics = {"bigbatch/batch_size": float(record.batch_size), "bigbatch/loss": record.loss}
    if statistics is not None:
        metrics["bigbatch/similarity"] = statistics.similarity
        metrics["bigbatch/noise_scale"] = statistics.noise_scale
    for group, lr in enumerate(record.lr):
        metrics[f"bigbatch/lr/{group}" if group else "bigbatch/lr"] = lr
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
