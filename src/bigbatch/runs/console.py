"""What a training shows while it runs: a live line in a terminal, plain lines elsewhere."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Shown
from rich.text import Text

from bigbatch.runs.metrics import Scores, Table
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.step_record import StepRecord

_ANY = 10_000  # columns, of a console that is wide enough
_LINES = 5  # of a training, where there is no terminal
_WINDOWS = 50  # similarity and noise scale are averaged over total samples / _WINDOWS


def plain_console(**options: Any) -> Console:
    """A console on which brackets and colons are text, of paths and policies too, not style.

    Args:
        options: of rich's own.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


class LiveView:
    """Shows trainings one after another.

    Args:
        console: where to, a `plain_console`; in a terminal a bar is redrawn, elsewhere a few lines
            are printed.
        quiet: show nothing but what `say` and `table` are given.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console = console
        self._quiet = quiet

    def print(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def table(self, found: Table, title: str) -> None:
        """The results; where the console is too narrow for whole words, they are wrapped."""
        shown = _shown(found, title, wraps=False)
        unbound = self.console.options.update(max_width=_ANY)
        if self.console.measure(shown, options=unbound).minimum > self.console.width:
            shown = _shown(found, title, wraps=True)
        self.console.print(shown)

    @contextmanager
    def training(
        self, name: str, total: int, done: int, target: float | None
    ) -> Iterator["TrainingView"]:
        """One training of `total` samples, of which `done` were consumed before."""
        bar = _bar(self.console) if self.redraws else None
        with bar or nullcontext():
            task = (
                bar.add_task(escape(name), total=total, completed=done, numbers="") if bar else None
            )
            yield TrainingView(self, name, total, done, target, bar, task)

    @property
    def redraws(self) -> bool:
        """Whether there is a terminal, and something is to be shown."""
        return not self._quiet and self.console.is_terminal

    @property
    def prints_lines(self) -> bool:
        """Whether there is no terminal to redraw, and something is to be shown."""
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
        bar: Progress | None,
        task: TaskID | None,
    ) -> None:
        self._view = view
        self._name = name
        self._total = total
        self._done = done
        self._target = target
        self._bar = bar
        self._task = task
        self._average = NoiseAverage(total / _WINDOWS)
        self._noise: GradientStatistics | None = None
        self._scores: Scores = {}
        self._lines = done * _LINES // total
        self._seconds: float | None = None  # of training when this view first saw a step

    def step(self, record: StepRecord, scores: Scores | None) -> None:
        """Shows one step; `scores` where some were measured after it."""
        if self._seconds is None:
            self._seconds, self._done = record.elapsed_seconds, record.samples
        if record.statistics is not None:
            self._noise = self._average.update(record.statistics)
        self._scores = scores or self._scores
        if self._bar is not None and self._task is not None:
            numbers = self._numbers(record)
            self._bar.update(self._task, completed=record.samples, numbers=numbers)
        elif self._view.prints_lines and self._line_is_due(record.samples):
            self._view.print(
                f"{self._name}  {record.samples:,}/{self._total:,}  {self._numbers(record)}"
            )

    def _line_is_due(self, samples: int) -> bool:
        due = samples * _LINES // self._total > self._lines
        self._lines += due
        return due

    def _numbers(self, record: StepRecord) -> str:
        elapsed = record.elapsed_seconds - (self._seconds or 0.0)
        speed = (record.samples - self._done) / elapsed if elapsed else math.nan
        goal = "" if self._target is None else f" (target {self._target:g})"
        parts = [
            f"batch {record.decision.batch_size}",
            f"similarity {self._noise.similarity:.2f}{goal}" if self._noise else "",
            f"noise scale {self._noise.noise_scale:.0f}" if self._noise else "",
            f"lr {record.lr[0]:.3g}",
            f"loss {record.loss:.3f}",
            *(f"{name} {score:.4g}" for name, score in self._scores.items()),
            f"{speed:,.0f} samples/s",
        ]
        return "  ".join(part for part in parts if part)


def _shown(found: Table, title: str, *, wraps: bool) -> Shown:
    headers = [column.replace(" ", "\n") for column in found.columns]
    table = Shown(*headers, title=title, title_justify="left", box=SIMPLE_HEAD)
    table.columns[0].overflow, table.columns[0].min_width = "fold", 8
    for number, column in enumerate(table.columns[1:], start=1):
        column.justify, column.no_wrap, column.overflow = "right", not wraps, "fold"
        if not wraps:
            column.min_width = max((len(row[number]) for row in found.rows), default=0)
    for row in found.rows:
        table.add_row(*row)
    return table


class _Bar(Progress):
    """A bar, and under it the numbers of the training, so that both fit a narrow terminal."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["numbers"], style="cyan") for task in self.tasks)


def _bar(console: Console) -> Progress:
    return _Bar(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
