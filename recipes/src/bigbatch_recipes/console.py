"""Progress and results of trainings on standard output: one line that updates, and tables."""

import math
import os
import sys

from bigbatch.errors import printable
from bigbatch.log.history import Table, score_unit
from bigbatch.log.paired_differences import Differences
from bigbatch.log.step_record import StepRecord
from bigbatch.log.text_table import terminal_width, text_table, wrapped
from bigbatch.statistics.averages import NoiseAverage

_LINES = 5  # of a training, where standard output is no terminal
_REDRAW_SECONDS = 0.1  # between two states of the line on a terminal
_WINDOWS = 50  # similarity and noise scale are averaged over total samples / _WINDOWS
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE = 12  # bars of a training, for equal numbers of samples
_CLEAR = "\x1b[K"  # to the end of the line


class LiveView:
    """Prints the progress and the results of trainings."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    @property
    def updates(self) -> bool:
        """Whether a line can be replaced: standard output is a terminal."""
        return not self.quiet and sys.stdout.isatty()

    def print(self, text: str) -> None:
        """Prints a text in lines of the terminal's width, without characters that steer it."""
        self._write(f"{wrapped(printable(text))}\n")

    def progress(self, text: str, *, replaceable: bool = False) -> None:
        """Prints a line, which the next one replaces if it is `replaceable`; nothing if quiet."""
        if not self.quiet:
            line = wrapped(printable(text.replace("\n", " ")))
            clear = _CLEAR if self.updates else ""
            self._write(f"{line}{clear}" + ("\r" if replaceable else "\n"))

    def table(self, table: Table, title: str) -> None:
        """Prints a table as wide as the terminal."""
        self._write(f"{printable(text_table(table, title, terminal_width()))}\n")

    def differences(self, differences: Differences | None) -> None:
        """Prints the table of differences; nothing where there is no other arm."""
        if differences is not None:
            self.table(differences.table(), differences.title)

    def _write(self, text: str) -> None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        try:
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
        except BrokenPipeError:  # of a reader that has ended, `head` say: trainings continue
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class TrainingView:
    """Prints the progress of one training of `total` samples; `done` were consumed before.

    On a terminal it is one line that updates, elsewhere a few lines.
    """

    def __init__(
        self, view: LiveView, name: str, total: int, done: int, target: float | None
    ) -> None:
        self._view, self._name, self._total = view, name, total
        self._target = "" if target is None else f" (target {target:g})"
        self._average = NoiseAverage(total / _WINDOWS)
        self._similarity = self._noise = ""
        self._scores: list[str] = []
        self._batches: dict[int, list[int]] = {}  # decided sizes by the number of their bar
        self._lines = done * _LINES // total
        self._first: StepRecord | None = None  # from which the speed is computed
        self._shown_seconds = -math.inf

    def step(self, record: StepRecord, scores: dict[str, float]) -> None:
        """Shows one step, and the scores after it if these were measured."""
        self._first = self._first or record
        ends = record.samples - record.batch_size, record.samples - 1
        first, last = (max(0, end) * _SPARKLINE // self._total for end in ends)
        for bar in range(first, last + 1):
            self._batches.setdefault(bar, []).append(record.target_batch_size)
        if record.statistics is not None:
            mean = self._average.update(record.statistics)
            self._similarity = f"similarity {mean.similarity:.2f}{self._target}"
            self._noise = f"noise scale {mean.noise_scale:.0f}"
        if scores:
            self._scores = [score_text(name, score) for name, score in scores.items()]
        if record.samples >= self._total:
            self._view.progress(self._line(record))
        elif self._view.updates:
            if record.elapsed_seconds >= self._shown_seconds + _REDRAW_SECONDS:
                self._shown_seconds = record.elapsed_seconds
                self._view.progress(self._line(record), replaceable=True)
        elif record.samples * _LINES // self._total > self._lines:
            self._lines += 1
            self._view.progress(self._line(record))

    def _line(self, record: StepRecord) -> str:
        """As many parts as the width of the terminal takes; those that matter most, first."""
        assert self._first is not None
        elapsed = record.elapsed_seconds - self._first.elapsed_seconds
        speed = (record.samples - self._first.samples) / elapsed if elapsed else math.nan
        parts = {  # in the order of the line; with the order of their importance
            f"{100 * record.samples // self._total:3} %": 0,
            f"{sparkline(self._batches):{_SPARKLINE}}": 3,
            f"batch {record.decision.batch_size:,}": 1,
            f"loss {record.loss:.3f}": 2,
            **dict.fromkeys(self._scores[:1], 4),
            self._similarity: 5,
            self._noise: 6,
            f"lr {record.lr[0]:.3g}": 8,
            **dict.fromkeys(self._scores[1:], 9),
            f"{speed:,.0f} samples/s": 7,
        }
        width = terminal_width() - 1  # a full line would wrap on some terminals
        room = width - len(self._name)
        chosen = set()
        for part in sorted(filter(None, parts), key=parts.__getitem__):
            if len(part) + 2 <= room:
                room -= len(part) + 2
                chosen.add(part)
        return "  ".join([self._name, *(part for part in parts if part in chosen)])[:width]


def score_text(name: str, value: float) -> str:
    """A score in words: test accuracy 98.2 %."""
    label, unit, factor = score_unit(name, [value])
    return f"{label} {factor * value:{'.1f' if unit else '.4g'}}{unit}"


def sparkline(batches: dict[int, list[int]]) -> str:
    """A bar for each part of the samples of a training, as high as its mean batch size.

    A bar is one higher for each factor of 1.4 above the smallest mean, or of more where the largest
    would be too high. The parts before a training was resumed are blank.
    """
    means = [math.log2(sum(sizes) / len(sizes)) for sizes in batches.values()]
    scale = min(2.0, (len(_BARS) - 1) / ((max(means) - min(means)) or 1.0))
    bars = (_BARS[round(scale * (mean - min(means)))] for mean in means)
    return " " * min(batches) + "".join(bars)
