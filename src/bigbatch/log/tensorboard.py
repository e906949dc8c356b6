"""Metrics as TensorBoard events."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.tensorboard.writer import SummaryWriter

from bigbatch.log.run_directory import Row, RunDirectory

_FLUSH = 2  # seconds; after an interrupt, the writer's thread may sleep for as long
_SCALARS = ("loss", "batch_size", "similarity", "noise_scale")


class TensorBoardLog:
    """Writes the rows of a run for TensorBoard; a resumed run hides steps after its checkpoint.

    Any error gives one warning, and training continues without events.

    Args:
        run: the run.
        first_step: the step that is written first.
    """

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        self._run = run
        self._writer: SummaryWriter | None = None
        with self._warn_of_errors():
            path = str(run.events)
            self._writer = SummaryWriter(path, purge_step=first_step, flush_secs=_FLUSH)

    def __enter__(self) -> "TensorBoardLog":
        return self

    def __exit__(self, *_: object) -> None:
        with self._warn_of_errors():
            if self._writer is not None:
                self._writer.close()

    def append(self, row: Row) -> None:
        """Adds one step."""
        with self._warn_of_errors():
            if self._writer is not None:
                _write(self._writer, row)

    @contextmanager
    def _warn_of_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            self._run.warn_not_written("events", "TensorBoard events are not being written", error)


def _write(writer: SummaryWriter, row: Row) -> None:
    step = row["step"]
    for name in _SCALARS:
        if row[name] is not None:
            writer.add_scalar(name, row[name], step)
    for name, score in (row["metrics"] or {}).items():
        if score is not None:
            writer.add_scalar(name, score, step)
    writer.add_scalar("lr", row["lr"][0], step)
