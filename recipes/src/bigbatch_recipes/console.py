"""Progress and results of trainings, as lines and tables."""

import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from bigbatch.log.history import Table
from bigbatch.log.paired_differences import Differences
from bigbatch.log.step_record import StepRecord
from bigbatch.statistics.averages import NoiseAverage

_UNLIMITED = 10_000  # columns of a console that is wide enough for any table
_LINES = 5  # of a training
_WINDOWS = 50  # similarity and noise scale are averaged over total samples / _WINDOWS


def plain_console(**options: Any) -> Console:
    """A console that prints brackets and colons as text, not as rich's markup.

    Args:
        options: further options of rich's `Console`.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


class LiveView:
    """Prints the progress and the results of trainings.

    Args:
        console: a `plain_console`.
        quiet: whether to print results alone, without progress.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console = console
        self._quiet = quiet

    def print(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, soft_wrap=True)

    def progress(self, text: str) -> None:
        """Prints one line, unless the view is quiet."""
        if not self._quiet:
            self.print(text)

    def table(self, table: Table, title: str) -> None:
        """Prints a table; cells are wrapped where the console is too narrow for whole words."""
        rich_table = _rich_table(table, title, wraps=False)
        unlimited = self.console.options.update(max_width=_UNLIMITED)
        if self.console.measure(rich_table, options=unlimited).minimum > self.console.width:
            rich_table = _rich_table(table, title, wraps=True)
        self.console.print(rich_table)

    def differences(self, differences: Differences | None) -> None:
        """Prints the table of differences; nothing where there is no other arm."""
        if differences is not None:
            self.table(differences.table(), differences.title)

    def training(self, name: str, total: int, done: int, target: float | None) -> "TrainingView":
        """The view of one training of `total` samples, of which `done` were consumed before."""
        return TrainingView(self, name, total, done, target)


class TrainingView:
    """Prints a few lines of one training."""

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


def _rich_table(table: Table, title: str, *, wraps: bool) -> RichTable:
    headers = [column.replace(" ", "\n") for column in table.columns]
    rich_table = RichTable(*headers, title=title, title_justify="left", box=SIMPLE_HEAD)
    rich_table.columns[0].overflow, rich_table.columns[0].min_width = "fold", 8
    for number, column in enumerate(rich_table.columns[1:], start=1):
        column.justify, column.no_wrap, column.overflow = "right", not wraps, "fold"
        if not wraps:
            column.min_width = max((len(row[number]) for row in table.rows), default=0)
    for row in table.rows:
        rich_table.add_row(*row)
    return rich_table
