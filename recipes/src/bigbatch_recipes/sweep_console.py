"""Progress of a sweep: a line per running training in a terminal, else a line at each end."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.live import Live
from rich.table import Table
from rich.text import Text

from bigbatch.errors import RunError
from bigbatch.log.history import history_of
from bigbatch.log.row_schema import Row, parse_line, require_step
from bigbatch_recipes.console import LiveView, Scores
from bigbatch_recipes.run_directory import RunDirectory


@dataclass
class TrainingCounts:
    """Numbers of trainings by state."""

    finished: int
    failed: int
    running: int
    waiting: int

    def __str__(self) -> str:
        total = self.finished + self.failed + self.running + self.waiting
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.finished} of {total} finished{failed}, {self.running} running, "
            f"{self.waiting} waiting"
        )


class RunFollower:
    """Reads a run's log while another process writes it.

    Args:
        run: the run.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._start_again()

    def _start_again(self) -> None:
        self._position = 0
        self._last: Row | None = None
        self._scores: Scores = {}

    def progress(self) -> str:
        """Epoch, samples, batch, loss and latest scores, as text."""
        self._read_new_rows()
        last, epochs = self._last, self._run.settings["epochs"]
        if last is None:
            return "starting"
        loss = "" if last["loss"] is None else f"  loss {last['loss']:.3f}"
        return (
            f"epoch {last['epoch'] + 1}/{epochs}  {last['samples']:,} samples  "
            f"batch {last['batch_size']}{loss}{self.scores_text()}"
        )

    def scores_text(self) -> str:
        """The latest scores, as text."""
        self._read_new_rows()
        texts = {name: "nan" if s is None else f"{s:.4g}" for name, s in self._scores.items()}
        return "".join(f"  {name} {text}" for name, text in texts.items())

    def outcome(self) -> str:
        """Whether the run finished or diverged, and its scores, as text."""
        outcome = "finished"
        with suppress(RunError):  # a damaged log does not stop a sweep; the report names it
            outcome = "diverged" if history_of(self._run.path).divergence else outcome
        return outcome + self.scores_text()

    def _read_new_rows(self) -> None:
        metrics = self._run.log.metrics
        if not metrics.exists():
            return
        with metrics.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:  # truncated by a resumption
                self._start_again()
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.splitlines():
            try:
                row = parse_line(line)
                require_step(str(metrics), row, None)
            except (RunError, ValueError):  # the file was truncated, and has grown again
                self._start_again()
                return
            self._last, self._scores = row, row["metrics"] or self._scores


class SweepConsole:
    """Shows the trainings of a sweep as they run side by side.

    Args:
        view: the view to print to.
        name: name of the sweep.
    """

    def __init__(self, view: LiveView, name: str) -> None:
        self._view = view
        self._name = name
        self._live: Live | None = None

    @contextmanager
    def live(self) -> Iterator[None]:
        """A context in which `update` redraws, in a terminal."""
        if not self._view.redraws:
            yield
            return
        with Live(console=self._view.console, refresh_per_second=4, transient=True) as self._live:
            yield

    def update(self, running: Mapping[str, RunFollower], counts: TrainingCounts) -> None:
        """Redraws the lines of running trainings."""
        if self._live is None:
            return
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(self._name, "bold"), str(counts))
        for name, follower in running.items():
            table.add_row(Text(name, "cyan"), follower.progress())
        self._live.update(table)

    def print_ended(self, line: str, counts: TrainingCounts) -> None:
        """Prints one line for a training that ended."""
        if self._live is not None or self._view.prints_lines:
            self._view.print(f"{line}  ({counts})")
