"""What every step was, to a Lightning trainer's own loggers."""

import math
import warnings
from typing import Any

from bigbatch.training.step_record import StepRecord


class StepLogger:
    """Writes records as Lightning writes metrics: its loggers, its steps, every n-th of them.

    A logger that fails is left out from then on, which is said once; training continues.
    """

    def __init__(self) -> None:
        self._failed: list[Any] = []

    def append(self, trainer: Any, record: StepRecord) -> None:
        """Writes one step, where it is due.

        Args:
            trainer: whose loggers; its `log_every_n_steps` holds, as for its own metrics.
            record: of the step that has just ended.
        """
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not every or trainer.global_step % every:
            return
        metrics = metrics_of(record)
        for logger in trainer.loggers:
            if any(logger is failed for failed in self._failed):
                continue
            try:  # a step has the number that Lightning's own metrics have: from 0
                logger.log_metrics(metrics, step=trainer.global_step - 1)
            except Exception as error:
                self._failed.append(logger)
                warnings.warn(
                    f"{type(logger).__name__} could not log batch size and noise "
                    f"({type(error).__name__}: {error}); training continues without that",
                    stacklevel=2,
                )


def metrics_of(record: StepRecord) -> dict[str, float]:
    """By the names in the log; what was not measured, or is not finite, is left out."""
    metrics = {
        "bigbatch/batch_size": float(record.batch_size),
        "bigbatch/similarity": record.similarity,
        "bigbatch/noise_scale": record.noise_scale,
        "bigbatch/loss": record.loss,
    }
    for group, lr in enumerate(record.lr):
        metrics[f"bigbatch/lr/{group}" if group else "bigbatch/lr"] = lr
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
