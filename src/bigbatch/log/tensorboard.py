"""The rows of a log as TensorBoard events."""

import weakref
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

    def add(self, row: Row) -> None:
        """Adds the values of a step, or scores after it; those that are None are left out."""
        values = {name: row.get(name) for name in _SCALARS} | (row["metrics"] or {})
        values["lr"] = row["lr"][0] if "lr" in row else None
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, row["step"])
