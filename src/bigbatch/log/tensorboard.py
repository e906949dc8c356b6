"""The rows of a log as TensorBoard events."""

import weakref
from collections.abc import Mapping
from pathlib import Path

from bigbatch.log.row_schema import Row

_FLUSH = 2  # seconds; after an interrupt, the writer's thread may sleep for as long
_SCALARS = ("loss", "batch_size", "similarity", "noise_scale")


class TensorBoardWriter:
    """Writes rows as events, which are complete when the object is deleted or the process exits.

    Args:
        folder: the folder of the events.
        first_step: the step that is written first; events of an earlier training from this step on
            are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=_FLUSH)
        self.close = weakref.finalize(self, self._writer.close)

    def add_row(self, row: Row) -> None:
        """Adds a step."""
        values = {name: row[name] for name in _SCALARS}
        self.add_scores(row["step"], {**values, "lr": row["lr"][0], **(row["metrics"] or {})})

    def add_scores(self, step: int, scores: Mapping[str, float | None]) -> None:
        """Adds values of a step; those that are None are left out."""
        for name, value in scores.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
