"""Progress and results of trainings, as lines and tables on standard output."""

import math
import shutil
import sys

from bigbatch.errors import printable
from bigbatch.log.history import Table
from bigbatch.log.paired_differences import Differences
from bigbatch.log.step_record import StepRecord
from bigbatch.log.text_table import text_table
from bigbatch.statistics.averages import NoiseAverage

_LINES = 5  # of a training
_WINDOWS = 50  # similarity and noise scale are averaged over total samples / _WINDOWS


class LiveView:
    """Prints the progress and the results of trainings."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def print(self, text: str) -> None:
        """Prints a text, without characters that steer a terminal."""
        sys.stdout.write(f"{printable(text)}\n")

    def progress(self, text: str) -> None:
        """Prints a line, unless the view is quiet."""
        if not self._quiet:
            self.print(text.replace("\n", " "))

    def table(self, table: Table, title: str) -> None:
        """Prints a table as wide as the terminal."""
        self.print(text_table(table, title, shutil.get_terminal_size().columns))

    def differences(self, differences: Differences | None) -> None:
        """Prints the table of differences; nothing where there is no other arm."""
        if differences is not None:
            self.table(differences.table(), differences.title)


class TrainingView:
    """Prints a few lines of one training of `total` samples; `done` were consumed before."""

    def __init__(
        self, view: LiveView, name: str, total: int, done: int, target: float | None
    ) -> None:
        self._view, self._name, self._total = view, name, total
        self._target = "" if target is None else f" (target {target:g})"
        self._average = NoiseAverage(total / _WINDOWS)
        self._noise = self._scores = ""
        self._lines = done * _LINES // total
        self._first: StepRecord | None = None  # from which the speed is computed

    def step(self, record: StepRecord, scores: dict[str, float]) -> None:
        """Shows one step, and the scores after it if these were measured."""
        self._first = self._first or record
        if record.statistics is not None:
            mean = self._average.update(record.statistics)
            similarity = f"similarity {mean.similarity:.2f}{self._target}"
            self._noise = f"  {similarity}  noise scale {mean.noise_scale:.0f}"
        if scores:
            self._scores = "".join(f"  {name} {score:.4g}" for name, score in scores.items())
        if record.samples * _LINES // self._total > self._lines:
            self._lines += 1
            elapsed = record.elapsed_seconds - self._first.elapsed_seconds
            speed = (record.samples - self._first.samples) / elapsed if elapsed else math.nan
            self._view.progress(
                f"{self._name}  {record.samples:,}/{self._total:,}  "
                f"batch {record.decision.batch_size}{self._noise}  lr {record.lr[0]:.3g}  "
                f"loss {record.loss:.3f}{self._scores}  {speed:,.0f} samples/s"
            )
