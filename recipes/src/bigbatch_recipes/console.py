"""Progress of a training: a progress bar in a terminal, a few lines elsewhere."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from bigbatch.log.history import Table
from bigbatch.log.paired_differences import Differences
from bigbatch.log.step_record import StepRecord
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics

Scores = Mapping[str, float]

_UNLIMITED = 10_000  # columns of a console that is wide enough for any table
_LINES = 5  # lines of a training without a terminal
_WINDOWS = 50  # similarity and noise scale are averaged over total samples / _WINDOWS


def plain_console(**options: Any) -> Console:
    """A console that prints brackets and colons as text, not as rich's markup.

    Args:
        options: further options of rich's `Console`.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


class LiveView:
    """Shows trainings one after another.

    Args:
        console: a `plain_console`. In a terminal a progress bar is redrawn, elsewhere a few lines
            are printed.
        quiet: whether to show nothing but what `print` and `table` are given.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console = console
        self._quiet = quiet

    def print(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, soft_wrap=True)

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

    @contextmanager
    def training(
        self, name: str, total: int, done: int, target: float | None
    ) -> Iterator["TrainingView"]:
        """The view of one training of `total` samples, of which `done` were consumed before."""
        bar = _ProgressBar(self.console, name, total, done) if self.redraws else None
        with bar or nullcontext():
            yield TrainingView(self, name, total, done, target, bar)

    @property
    def redraws(self) -> bool:
        """Whether to redraw a progress bar: there is a terminal, and the view is not quiet."""
        return not self._quiet and self.console.is_terminal

    @property
    def prints_lines(self) -> bool:
        """Whether to print lines: there is no terminal, and the view is not quiet."""
        return not self._quiet and not self.console.is_terminal


class TrainingView:
    """The view of one training."""

    def __init__(
        self,
        view: LiveView,
        name: str,
        total: int,
        done: int,
        target: float | None,
        bar: "_ProgressBar | None",
    ) -> None:
        self._view, self._bar = view, bar
        self._name, self._total, self._target = name, total, target
        self._average = NoiseAverage(total / _WINDOWS)
        self._statistics: GradientStatistics | None = None
        self._scores: Scores = {}
        self._lines = done * _LINES // total
        self._first: StepRecord | None = None  # from which the speed is computed

    def step(self, record: StepRecord, scores: Scores | None) -> None:
        """Shows one step, and the scores after it if these were measured."""
        self._first = self._first or record
        if record.statistics is not None:
            self._statistics = self._average.update(record.statistics)
        self._scores = scores or self._scores
        if self._bar is not None:
            self._bar.show(record.samples, self._numbers(record))
        elif self._view.prints_lines and self._line_is_due(record.samples):
            self._view.print(
                f"{self._name}  {record.samples:,}/{self._total:,}  {self._numbers(record)}"
            )

    def _line_is_due(self, samples: int) -> bool:
        due = samples * _LINES // self._total > self._lines
        self._lines += due
        return due

    def _numbers(self, record: StepRecord) -> str:
        first, statistics = self._first or record, self._statistics
        elapsed = record.elapsed_seconds - first.elapsed_seconds
        speed = (record.samples - first.samples) / elapsed if elapsed else math.nan
        target = "" if self._target is None else f" (target {self._target:g})"
        numbers = [
            f"batch {record.decision.batch_size}",
            f"similarity {statistics.similarity:.2f}{target}" if statistics else "",
            f"noise scale {statistics.noise_scale:.0f}" if statistics else "",
            f"1 step in {record.every} measured" if record.every not in (None, 1) else "",
            f"lr {record.lr[0]:.3g}",
            f"loss {record.loss:.3f}",
            *(f"{name} {score:.4g}" for name, score in self._scores.items()),
            f"{speed:,.0f} samples/s",
        ]
        return "  ".join(filter(None, numbers))


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


class _ProgressBar(Progress):
    """A bar, and below it the numbers of the training, so that both fit a narrow terminal."""

    def __init__(self, console: Console, name: str, total: int, done: int) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self.add_task(escape(name), total=total, completed=done, numbers="")

    def show(self, samples: int, numbers: str) -> None:
        self.update(self._task, completed=samples, numbers=numbers)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["numbers"], style="cyan") for task in self.tasks)
