"""The metrics as TensorBoard events."""

from torch.utils.tensorboard.writer import SummaryWriter

from bigbatch.report.run_directory import Row, RunDirectory

_SCALARS = ("loss", "batch_size", "similarity", "noise_scale", "test_accuracy")


class Events:
    """Writes a run's rows for TensorBoard; a resumed run hides what lay past its checkpoint.

    Args:
        run: whose events they are.
        first_step: the step that will be written first.
    """

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        self._writer = SummaryWriter(str(run.events), purge_step=first_step)

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def append(self, row: Row) -> None:
        """Adds one step."""
        step = row["step"]
        for name in _SCALARS:
            if row[name] is not None:
                self._writer.add_scalar(name, row[name], step)
        self._writer.add_scalar("lr", row["lr"][0], step)
