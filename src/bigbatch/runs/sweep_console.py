"""What a sweep shows while it runs: a line a running training in a terminal, else a line an end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.live import Live
from rich.table import Table
from rich.text import Text

from bigbatch.errors import RunError
from bigbatch.runs.console import LiveView
from bigbatch.runs.metrics import Scores, history_of
from bigbatch.runs.row_schema import require_step
from bigbatch.runs.run_directory import Row, RunDirectory, parse_row


@dataclass
class TrainingCounts:
    """How many trainings are in which state."""

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
    """A run's log, read on as another process writes it.

    Args:
        run: whose.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._read = 0
        self._last: Row | None = None
        self.scores: Scores = {}

    def progress(self) -> str:
        """In words: epoch, samples, batch, loss, and the scores so far."""
        self._read_on()
        last, epochs = self._last, self._run.settings["epochs"]
        if last is None:
            return "starting"
        loss = "" if last["loss"] is None else f"  loss {last['loss']:.3f}"
        return (
            f"epoch {last['epoch'] + 1}/{epochs}  {last['samples']:,} samples  "
            f"batch {last['batch_size']}{loss}{self.scores_text()}"
        )

    def scores_text(self) -> str:
        """The scores so far, in words."""
        self._read_on()
        shown = {name: "nan" if s is None else f"{s:.4g}" for name, s in self.scores.items()}
        return "".join(f"  {name} {score}" for name, score in shown.items())

    def outcome(self) -> str:
        """How it ended, and with which scores."""
        how = "finished"
        with suppress(RunError):  # a damaged log stops no sweep: who reads it next says so
            how = "diverged" if history_of(self._run).divergence else how
        return how + self.scores_text()

    def _read_on(self) -> None:
        metrics = self._run.metrics
        if not metrics.exists():
            return
        with metrics.open("rb") as file:
            if file.seek(0, 2) < self._read:  # cut at its checkpoint
                self._read, self._last, self.scores = 0, None, {}
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                row = parse_row(line)
                require_step(str(metrics), row, None)
            except (RunError, ValueError):  # no whole line: it was cut, and has grown again
                self._read, self._last, self.scores = 0, None, {}
                return
            self._last, self.scores = row, row["metrics"] or self.scores


class SweepConsole:
    """Shows the trainings of a sweep as they run side by side.

    Args:
        view: where to, and whether at all.
        name: of the sweep.
    """

    def __init__(self, view: LiveView, name: str) -> None:
        self._view = view
        self._name = name
        self._live: Live | None = None

    @contextmanager
    def live(self) -> Iterator[None]:
        """Redraws in here, where there is a terminal."""
        if not self._view.redraws:
            yield
            return
        with Live(console=self._view.console, refresh_per_second=4, transient=True) as self._live:
            yield

    def update(self, running: Mapping[str, RunFollower], counts: TrainingCounts) -> None:
        """Redraws the line of each running training."""
        if self._live is None:
            return
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(self._name, "bold"), str(counts))
        for name, followed in running.items():
            table.add_row(Text(name, "cyan"), followed.progress())
        self._live.update(table)

    def print_ended(self, line: str, counts: TrainingCounts) -> None:
        """One line that stays, for a training that ended."""
        if self._live is not None or self._view.prints_lines:
            self._view.print(f"{line}  ({counts})")
