"""A run directory: everything that one training leaves on disk.

    config.yaml      what to repeat: the settings, and the versions that ran
    metrics.jsonl    one JSON object a step
    checkpoint.pt    the latest checkpoint, with its digest
    deepspeed/       what DeepSpeed keeps of it, where it joins the ranks
    events/          the same numbers for TensorBoard
    report.html      the report
    log.txt          what it said, where a sweep trained it
    vocab.txt        what a run that begins from this one needs, where there is such a thing

A folder of runs is a study; it has a study.yaml instead.
"""

import json
import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bigbatch.digest import file_digest, load_state, require_digests, save_state
from bigbatch.errors import RunError, StateError
from bigbatch.runs.atomic_files import made_whole, replacing, write_atomically
from bigbatch.runs.run_config import describe, read_config, read_trainings

Row = dict[str, Any]


class RunDirectory:
    """One training's files.

    Args:
        path: the directory.
        settings: what it was started with.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self._kept: dict[str, str] = {}  # digests of texts, by file name
        self._unwritten: deque[bytes] = deque()  # lines of the metrics
        self._lost: dict[str, Exception] = {}  # what could not be written, and why
        self._said: set[str] = set()

    @classmethod
    def create(
        cls, path: Path, settings: dict[str, Any], launch: str | None = None
    ) -> "RunDirectory":
        """Makes a new one, whole or not at all; it remembers which launch of torchrun began it.

        Raises:
            RunError: there is something at `path` already.
        """
        with made_whole(path) as making:
            write_atomically(making / "config.yaml", describe("run", settings, launch))
        return cls(path, settings)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Opens an existing one.

        Raises:
            RunError: there is none, or it is not ours.
        """
        if not path.is_dir():
            raise RunError(f"there is no run directory {path}; `ls runs` shows what there is")
        return cls(path, read_config(path / "config.yaml", "run"))

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.name

    @property
    def metrics(self) -> Path:
        """The file with one JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """The folder for TensorBoard."""
        return self.path / "events"

    def keep(self, texts: Mapping[str, str]) -> None:
        """Writes texts that a later run needs, by file name."""
        for name, text in texts.items():
            write_atomically(self.path / name, text.encode())
            self._kept[name] = file_digest(self.path / name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for one process; the system lets go when the process ends.

        Raises:
            RunError: another process trains in it.
        """
        try:
            with FileLock(self.path / ".lock", blocking=False):
                yield
        except Timeout:
            raise RunError(
                f"{self.path} is in use by another process; wait for it, or train elsewhere"
            ) from None

    def append(self, row: Row) -> None:
        """Adds one step; a kill loses at most this line.

        What a full disk refuses is said once and written with a later step, before anything else.
        """
        self._unwritten.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._write_rows()

    def _write_rows(self) -> bool:
        """Whether every line that was added is in the file."""
        length = self._metrics_bytes()
        try:
            with self.metrics.open("ab") as file:
                while self._unwritten:
                    file.write(self._unwritten[0])
                    file.flush()
                    length += len(self._unwritten.popleft())
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.metrics, length)  # no half line
            self.say_lost("metrics", "metrics are not being written", error)
        else:
            self._lost.pop("metrics", None)
        return not self._unwritten

    def rows(self) -> list[Row]:
        """Every line of the metrics, but one at the end that a kill cut short.

        Raises:
            RunError: a line is damaged.
        """
        if not self.metrics.exists():
            return []
        *lines, last = self.metrics.read_bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(parse_row(line))
            except ValueError:
                raise RunError(
                    f"{self.metrics}, line {number} is damaged; restore the file, or train again"
                ) from None
        with suppress(ValueError):
            rows.append(parse_row(last))
        return rows

    def save_checkpoint(self, state: dict[str, Any]) -> bool:
        """Replaces the checkpoint; it remembers how much of the metrics belongs to it.

        Returns:
            Whether it could be written, and the metrics before it.
        """
        if not self._write_rows():
            self.say_unsaved(self._lost["metrics"])
            return False
        try:
            with self.metrics.open("a") as metrics:
                os.fsync(metrics.fileno())
            with replacing(self.path / "checkpoint.pt") as file:
                save_state(
                    {"metrics_bytes": self._metrics_bytes(), "kept": self._kept, "state": state},
                    file,
                )
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            self.say_unsaved(error)
            return False
        self._lost.pop("checkpoint", None)
        return True

    def say_unsaved(self, error: Exception) -> None:
        """Says, once, that a checkpoint could not be written and why."""
        self.say_lost("checkpoint", "the checkpoint could not be written", error)

    def say_lost(self, name: str, what: str, error: Exception) -> None:
        """Says, once, what could not be written and why; `require_whole` says it at the end.

        Args:
            name: of the file or folder.
            what: in words.
            error: why.
        """
        self._lost[name] = error
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"{what} ({error}); training continues", stacklevel=4)

    def require_whole(self) -> None:
        """Does nothing where all that was to be written at last was.

        Raises:
            RunError: metrics, the last checkpoint or events are not on the disk.
        """
        if not self._lost:
            return
        reason = next(iter(self._lost.values()))
        again = f", then bigbatch train --resume {self.path} repeats the steps that are missing"
        raise RunError(
            f"{self.path} is trained to its end, but not all of its {', '.join(self._lost)} could "
            f"be written ({reason}); make room" + again * (self._lost.keys() != {"events"})
        )

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The latest checkpoint, or None before the first; cuts off metrics that lie past it.

        Raises:
            RunError: the file is damaged.
        """
        saved = self._saved()
        if saved is None:
            self._cut_metrics(0)
            return None
        length, state = saved
        self._cut_metrics(length)
        return state

    def load_weights(self) -> dict[str, Any] | None:
        """The model's state in the latest checkpoint, or None before the first; changes nothing.

        Raises:
            RunError: the file is damaged.
        """
        saved = self._saved()
        if saved is None:
            return None
        model = saved[1].get("model")
        if not isinstance(model, dict):
            raise RunError(f"{self.path / 'checkpoint.pt'} has no weights; name another run")
        return model

    def _saved(self) -> tuple[int, dict[str, Any]] | None:
        """How much of the metrics belongs to the checkpoint, and the checkpoint."""
        file = self.path / "checkpoint.pt"
        if not file.exists():
            return None
        try:
            with file.open("rb") as opened:
                saved = load_state(opened, str(file))
            require_digests(self.path, saved["kept"])
            return int(saved["metrics_bytes"]), dict(saved["state"])
        except StateError as error:
            raise RunError(
                f"{error}; restore it from a copy, or delete {file.name} to start the run again"
            ) from None
        except Exception as error:
            raise RunError(
                f"{file} cannot be loaded ({type(error).__name__}); delete it to start the run "
                "again"
            ) from error

    def _metrics_bytes(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def _cut_metrics(self, length: int) -> None:
        if self._metrics_bytes() < length:
            raise RunError(
                f"{self.metrics} is shorter than its checkpoint remembers; delete checkpoint.pt to "
                "start the run again"
            )
        if self.metrics.exists():
            os.truncate(self.metrics, length)


def parse_row(line: bytes) -> Row:
    """A line of the metrics.

    Raises:
        ValueError: it is no JSON object, or has a number that JSON lacks.
    """
    try:
        row = json.loads(line.decode(), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too many brackets") from None
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row


def _refuse(name: str) -> None:
    raise ValueError(name)


def find_runs(path: Path) -> list[RunDirectory]:
    """The run at `path`, or the runs of the study there.

    Raises:
        RunError: it is neither, or nothing has begun.
    """
    if not (path / "study.yaml").exists():
        return [RunDirectory.open(path)]
    names = [name for name in read_trainings(path) if (path / name).exists()]
    if not names:
        raise RunError(f"{path}: no run of this study has begun")
    return [RunDirectory.open(path / name) for name in names]
