"""A run directory: all files of one training.

    config.yaml      the settings, and the versions that ran
    metrics.jsonl    one JSON object per step
    checkpoint.pt    the latest checkpoint, with its digest
    deepspeed/       DeepSpeed's part of the checkpoint, with engine=deepspeed
    events/          the metrics for TensorBoard
    report.html      the report
    log.txt          standard error of a training that a sweep started
    vocab.txt        the vocabulary of a language model, for runs that begin with its weights

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
from bigbatch.log.atomic_files import create_directory_atomically, open_atomically, write_atomically
from bigbatch.log.run_config import config_yaml, read_config, read_trainings

Row = dict[str, Any]


class RunDirectory:
    """The files of one training.

    Args:
        path: the directory.
        settings: the settings of the training.
    Attributes:
        name: name of the directory.
        metrics: the file with one JSON object per step.
        events: the folder for TensorBoard.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.name = path, path.name
        self.settings = settings
        self.metrics, self.events = path / "metrics.jsonl", path / "events"
        self._text_digests: dict[str, str] = {}  # by file name
        self._unwritten_rows: deque[bytes] = deque()
        self._write_errors: dict[str, Exception] = {}  # by file or folder; missing after a success
        self._warnings: set[str] = set()

    @classmethod
    def create(
        cls, path: Path, settings: dict[str, Any], launch: str | None = None
    ) -> "RunDirectory":
        """Creates a run directory atomically; its config names the launch of torchrun.

        Raises:
            RunError: there is something at `path` already.
        """
        with create_directory_atomically(path) as directory:
            write_atomically(directory / "config.yaml", config_yaml("run", settings, launch))
        return cls(path, settings)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Opens an existing run directory.

        Raises:
            RunError: there is none, or bigbatch did not write it.
        """
        if not path.is_dir():
            raise RunError(f"there is no run directory {path}; `ls runs` shows what there is")
        return cls(path, read_config(path / "config.yaml", "run"))

    def save_texts(self, texts: Mapping[str, str]) -> None:
        """Writes texts that later runs need, by file name."""
        for name, text in texts.items():
            write_atomically(self.path / name, text.encode())
            self._text_digests[name] = file_digest(self.path / name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the directory; the system releases the lock when the process ends.

        Raises:
            RunError: another process has the lock.
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

        After a write error, the first of which gives a warning, the line is written with a later
        step, before that step's own.
        """
        self._unwritten_rows.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._write_rows()

    def _write_rows(self) -> bool:
        """Writes the rows that are not in the file yet; returns whether that succeeded."""
        length = self._metrics_bytes()
        try:
            with self.metrics.open("ab") as file:
                while self._unwritten_rows:
                    file.write(self._unwritten_rows[0])
                    file.flush()
                    length += len(self._unwritten_rows.popleft())
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.metrics, length)  # removes an incomplete line
            self.warn_not_written("metrics", "metrics are not being written", error)
        else:
            self._write_errors.pop("metrics", None)
        return not self._unwritten_rows

    def rows(self) -> list[Row]:
        """All lines of the metrics, except an incomplete line at the end.

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
        """Replaces the checkpoint, which also has the length of the metrics up to it.

        Returns:
            Whether the metrics and the checkpoint were written.
        """
        if not self._write_rows():
            self.warn_checkpoint_not_written(self._write_errors["metrics"])
            return False
        try:
            with self.metrics.open("a") as metrics:
                os.fsync(metrics.fileno())
            length, digests = self._metrics_bytes(), self._text_digests
            with open_atomically(self.path / "checkpoint.pt") as file:
                save_state({"metrics_bytes": length, "kept": digests, "state": state}, file)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            self.warn_checkpoint_not_written(error)
            return False
        self._write_errors.pop("checkpoint", None)
        return True

    def warn_checkpoint_not_written(self, error: Exception) -> None:
        """Warns once that the checkpoint could not be written."""
        self.warn_not_written("checkpoint", "the checkpoint could not be written", error)

    def warn_not_written(self, name: str, message: str, error: Exception) -> None:
        """Warns once that a file could not be written; `require_all_written` refuses it at the end.

        Args:
            name: name of the file or folder.
            message: the start of the warning.
            error: the reason.
        """
        self._write_errors[name] = error
        if message not in self._warnings:
            self._warnings.add(message)
            warnings.warn(f"{message} ({error}); training continues", stacklevel=4)

    def require_all_written(self) -> None:
        """Checks at the end of a training that its files are complete.

        Raises:
            RunError: metrics, the last checkpoint or events could not be written.
        """
        if not self._write_errors:
            return
        names, reason = self._write_errors.keys(), next(iter(self._write_errors.values()))
        remedy = f", then bigbatch train --resume {self.path} repeats the steps that are missing"
        raise RunError(
            f"{self.path} is trained to its end, but not all of its {', '.join(names)} could be "
            f"written ({reason}); make room" + remedy * (names != {"events"})
        )

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The latest checkpoint, None before the first; removes metrics of steps after it.

        Raises:
            RunError: the file is damaged.
        """
        length, state = self._read_checkpoint() or (0, None)
        if self._metrics_bytes() < length:
            raise RunError(
                f"{self.metrics} is shorter than its checkpoint remembers; delete checkpoint.pt to "
                "start the run again"
            )
        if self.metrics.exists():
            os.truncate(self.metrics, length)
        return state

    def load_weights(self) -> dict[str, Any] | None:
        """The model's state in the latest checkpoint, None before the first; changes no file.

        Raises:
            RunError: the file is damaged.
        """
        checkpoint = self._read_checkpoint()
        if checkpoint is None:
            return None
        model = checkpoint[1].get("model")
        if not isinstance(model, dict):
            raise RunError(f"{self.path / 'checkpoint.pt'} has no weights; name another run")
        return model

    def _read_checkpoint(self) -> tuple[int, dict[str, Any]] | None:
        """(length of the metrics up to the checkpoint, state); None before the first one."""
        file = self.path / "checkpoint.pt"
        if not file.exists():
            return None
        try:
            with file.open("rb") as stream:
                checkpoint = load_state(stream, str(file))
            require_digests(self.path, checkpoint["kept"])
            return int(checkpoint["metrics_bytes"]), dict(checkpoint["state"])
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


def parse_row(line: bytes) -> Row:
    """The row of a line of the metrics.

    Raises:
        ValueError: the line is no JSON object, or has nan or infinity, which JSON lacks.
    """
    try:
        row = json.loads(line.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("too many brackets") from None
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def find_runs(path: Path) -> list[RunDirectory]:
    """The run at `path`, or the runs of the study there.

    Raises:
        RunError: there is neither, or no run of the study has begun.
    """
    if not (path / "study.yaml").exists():
        return [RunDirectory.open(path)]
    names = [name for name in read_trainings(path) if (path / name).exists()]
    if not names:
        raise RunError(f"{path}: no run of this study has begun")
    return [RunDirectory.open(path / name) for name in names]
