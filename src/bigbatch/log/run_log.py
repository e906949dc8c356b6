"""The log of one training: a folder that `bigbatch report`, `compare` and `replay` read.

    settings.json    the settings of the training, the versions and the machine that ran
    metrics.jsonl    one line per step, and one per call of `scores`; docs/logs.md has the keys
    events/          the same for TensorBoard, if asked for

[Note: Rows on disk]
Every line is written in one call and flushed, so that a kill loses at most the line that was being
written. Nothing in the folder changes before the first row (`open`): a log may be built, and a
checkpoint loaded, without a training. Before the first row the folder is locked, and rows after the
position of the loaded state are removed, with a last line that has no end (`_cut_rows`). Without a
loaded state a folder that has rows is refused. So a file has the rows of one training, in order.
"""

import os
import platform
import stat
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from json import dumps
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch import __version__
from bigbatch.errors import LoopError, RunError, SettingError, StateError
from bigbatch.log.atomic_files import expanded_path, lock_folder, write_atomically
from bigbatch.log.row_schema import (
    METRICS,
    SCHEMA,
    SETTINGS,
    Row,
    finite,
    line_of,
    parse_line,
    row_of,
    setting_kinds,
    statistics_of,
)
from bigbatch.log.step_record import StepRecord
from bigbatch.optim.optimizer_settings import rates_of
from bigbatch.optional_packages import import_optional
from bigbatch.setting_types import Count, Whole, checked
from bigbatch.state_checks import loads_state
from bigbatch.statistics.noise_scale import GradientStatistics

Value = float | Tensor

_SCALARS = ("loss", "batch_size", "similarity", "noise_scale")  # of TensorBoard, with lr and scores


class RunLog:
    """Writes the log of a training: one line per step, at once.

        log = bb.RunLog("runs/mine", settings={"seed": 0})
        for x, y in loader:
            ...                                             # a loop that only measures
            log.step(meter.read(samples=[len(x)]), optimizer=optimizer, loss=loss)
        log.scores(test_accuracy=93.1)

    `AdaptiveBatch(..., log="runs/mine")` writes its steps itself, and `train.log(...)` scores. On
    several ranks rank 0 alone writes. After a write error, of which one warning tells, rows are
    kept and written with a later one.

    Args:
        path: the folder; it is created before the first row.
        settings: what tables and reports name: numbers, text, True, False or None by name. Runs
            that differ only in `seed` are summarized.
        higher_is_better: whether a higher main score is better, which is the first one.
        tensorboard: whether to write TensorBoard events too, to the folder `events`.
    Raises:
        SettingError: a setting is of another type, or `path` is a file.
        MissingPackageError: `tensorboard=True`, and TensorBoard is not installed.
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        *,
        settings: dict[str, Any] | None = None,
        higher_is_better: bool = True,
        tensorboard: bool = False,
    ) -> None:
        self.path = expanded_path(path)
        self.metrics = self.path / METRICS  # the file of the rows
        try:
            is_file = not stat.S_ISDIR(self.path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_file = False
        except (OSError, ValueError) as error:  # a long name, a folder that may not be read
            raise SettingError(f"log={shortened(str(path))} is no folder: {error}") from None
        if is_file:
            raise SettingError(f"log={str(path)!r} is a file; name a folder")
        given = {**(settings or {}), "higher_is_better": higher_is_better}
        self.settings = {
            name: kind.check(f"settings[{name!r}]", given[name])
            for name, kind in setting_kinds(given).items()
        }
        if tensorboard:
            import_optional("tensorboard", "tensorboard")
        self.loop_settings: dict[str, Any] = {}  # of an AdaptiveBatch; `settings` go before them
        self.rank: int | None = None  # None to ask torch.distributed
        self.write_errors: dict[str, Exception] = {}  # by file or folder; missing after a success
        self._tensorboard = tensorboard
        self._events: Path | None = None  # TensorBoard's file
        self._unlock: Callable[[], object] | None = None  # while the folder is open
        self._unwritten: deque[bytes] = deque()
        self._length = 0  # bytes of the rows in the file
        self._lost_step = 0  # the last step whose row is missing in it
        self._warnings: set[str] = set()
        self._step = self._samples = 0
        self._sizes: tuple[int, int] | None = None  # batch size and micro-batches of the last step
        self._earlier_seconds, self._started = 0.0, time.perf_counter()
        self._continues = False  # whether the folder may have rows up to this step

    @property
    def writes(self) -> bool:
        """Whether this is rank 0, which alone writes."""
        if self.rank is not None:
            return self.rank == 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank() == 0
        return os.environ.get("RANK", "0") == "0"  # of torchrun, before there is a process group

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # rows

    @checked
    def step(
        self,
        statistics: GradientStatistics | None,
        *,
        optimizer: Optimizer,
        loss: Value | None = None,
        epoch: Whole = 0,
        batch_size: Count | None = None,
        skipped: bool = False,
    ) -> None:
        """Adds the next step of a loop that only measures; steps and samples are counted here.

        Args:
            statistics: as the meter returned them, not averaged; None for a step that was not
                measured.
            optimizer: has the learning rates of the step: call this before `scheduler.step()`.
            loss: mean loss over the batch.
            epoch: complete passes over the data.
            batch_size: samples of the step over all ranks; default: those of the statistics, or of
                the step before.
            skipped: whether the optimizer left the weights as they were.
        Raises:
            SettingError: the batch size is not known.
            RunError: at the first step, the folder has rows already or is in use.
        """
        if statistics is not None:
            self._sizes = round(statistics.samples), statistics.micro_batches
        size, micro_batches = self._sizes or (0, 1)
        if not (size := batch_size or size):
            raise SettingError("no step was measured yet; pass batch_size= in samples")
        row: Row = {
            "schema": SCHEMA,
            "step": self._step + 1,
            "epoch": epoch,
            "samples": self._samples + size,
            "batch_size": size,
            "micro_batches": min(micro_batches, size),
            "loss": None if loss is None else _number("loss", loss),
            "lr": rates_of(optimizer),
            **statistics_of(statistics),
            "skipped": skipped,
            "metrics": None,
            "elapsed_seconds": self._elapsed_seconds,
        }
        self._append(row)

    def record(self, record: StepRecord, **scores: Value) -> None:
        """Adds a step of an `AdaptiveBatch` that does not write itself, with scores after it.

        Raises:
            RunError: at the first step, the folder has rows already or is in use.
        """
        self._append({**row_of(record), "metrics": _numbers(scores) or None})

    def scores(self, **scores: Value) -> None:
        """Adds scores of the model after the last step, by name.

        The name may have the unit: `log.scores(**{"test accuracy, %": 93.1})`.

        Raises:
            LoopError: no step was added before.
        """
        if not self._step:
            raise LoopError("scores belong to a step, and none was logged yet; log them after one")
        if numbers := _numbers(scores):
            self._add({"step": self._step, "metrics": numbers})

    def _append(self, row: Row) -> None:
        if row["step"] <= self._step:
            raise RunError(
                f"step {row['step']} comes after step {self._step} in {self.path}: a log has one "
                "training; make another RunLog, or load the checkpoint to continue this one"
            )
        self._add(finite(row))
        self._step, self._samples = row["step"], row["samples"]

    def _add(self, row: Row) -> None:
        if self.writes:
            self.open()
            if row["step"] > self._lost_step:  # else scores without their row
                self._unwritten.append(line_of(row))
            self._write_rows()
            self._add_events(row)

    # the folder

    def open(self) -> None:
        """Locks the folder and prepares it for the next row, as the first row does by itself.

        Raises:
            RunError: another process writes to it, or it has rows of another training.
        """
        if self._unlock is not None or not self.writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._unlock = weakref.finalize(self, os.close, lock_folder(self.path))
            self._length = self._cut_rows()
            settings = {**self.loop_settings, **self.settings}
            write_atomically(self.path / SETTINGS, settings_json(settings))
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise RunError(f"{self.path} cannot be written: {error.strerror}") from None
            raise

    def close(self) -> None:
        """Writes what could not be written before, and releases the folder."""
        if self._unlock is not None:
            self.flush()
            self._release()
            self._continues = True
        self._events = None

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def flush(self) -> bool:
        """Writes rows that could not be written before, to the disk itself; returns whether."""
        return self._unlock is None or self._write_rows(to_disk=True)

    def warn_not_written(self, name: str, message: str, error: Exception) -> None:
        """Warns once that a file could not be written."""
        self.write_errors[name] = error
        if message not in self._warnings:
            self._warnings.add(message)
            warnings.warn(f"{message} ({error}); training continues", stacklevel=4)

    def _cut_rows(self) -> int:
        """Removes rows after the present position; returns the bytes of those before it.

        Raises:
            RunError: a line is damaged, or the rows are those of another training.
        """
        self.metrics.touch()
        *lines, _ = self.metrics.read_bytes().split(b"\n")
        if lines and not self._continues:
            raise RunError(
                f"{self.path} has the rows of a training, and no state of it was loaded; write to "
                "another folder, remove this one, or load the checkpoint to continue it"
            )
        length, step, samples = 0, 0, 0
        for number, line in enumerate(lines, start=1):
            try:
                row = parse_line(line)
                if row["step"] > self._step:
                    break
                if "samples" in row:
                    step, samples = row["step"], row["samples"]
            except (ValueError, KeyError, TypeError):
                place = f"{self.metrics}, line {number}"
                raise RunError(f"{place} is damaged; restore the file, or train again") from None
            length += len(line) + 1
        if step == self._step and samples != self._samples:
            raise RunError(
                f"{self.path} has {samples:,} samples at step {step}, and the loaded state "
                f"{self._samples:,}: it is the log of another training; name its own"
            )
        if step < self._step:
            self._lost_step = self._step
            warnings.warn(
                f"{self.path} ends at step {step} and the training continues after step "
                f"{self._step}; the rows between are missing",
                stacklevel=6,
            )
        os.truncate(self.metrics, length)
        return length

    def _write_rows(self, *, to_disk: bool = False) -> bool:
        """Writes the rows that are not in the file yet; returns whether that succeeded."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.metrics.open("ab") as file:
                if file.tell() > self._length and self._unwritten:
                    raise RunError(
                        f"{self.metrics} has rows of another writer too; give each its own log"
                    )
                if file.tell() < self._length and self.metrics.is_file():
                    self._lose_rows(file.tell())
                while self._unwritten:
                    file.write(self._unwritten[0])
                    file.flush()
                    self._length += len(self._unwritten.popleft())
                if to_disk:
                    os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.metrics, self._length)  # removes an incomplete line
            self.warn_not_written("metrics", "metrics are not being written", error)
        else:
            self.write_errors.pop("metrics", None)
        return not self._unwritten

    def _lose_rows(self, size: int) -> None:
        """Continues after the whole rows in a file that has become shorter; warns."""
        written = self._length
        with self.metrics.open("rb") as file:
            self._length = file.read(size).rfind(b"\n") + 1
        if self._length < size:
            os.truncate(self.metrics, self._length)
        self._lost_step = self._step
        # without scores, whose steps are lost
        self._unwritten = deque(x for x in self._unwritten if x.startswith(b'{"schema"'))
        warnings.warn(
            f"{self.metrics} has {size:,} of the {written:,} bytes that were written: another "
            f"program deleted or truncated it, and rows up to step {self._step} are lost; restore "
            "them from a copy after the training, which continues",
            stacklevel=5,
        )

    def _add_events(self, row: Row) -> None:
        """Adds a row to the TensorBoard events; any error gives one warning, and ends them.

        They are written at once: TensorBoard's own writers have a thread, which prints its errors.
        """
        if not self._tensorboard:
            return
        values = {name: row.get(name) for name in _SCALARS} | (row["metrics"] or {})
        values["lr"] = row["lr"][0] if "lr" in row else None
        scalars = [{"tag": n, "simple_value": x} for n, x in values.items() if x is not None]
        entries: list[dict[str, Any]] = [{"step": row["step"], "summary": {"value": scalars}}]
        try:
            event = import_module("tensorboard.compat.proto.event_pb2").Event
            writer = import_module("tensorboard.summary.writer.record_writer").RecordWriter
            if self._events is None:
                stamp = f"{time.time():017.6f}.{platform.node()}.{os.getpid()}"
                self._events = self.path / "events" / f"events.out.tfevents.{stamp}"
                self._events.parent.mkdir(exist_ok=True)
                # hides events of an earlier training from this step on
                start = {"step": row["step"], "session_log": {"status": "START"}}
                entries = [{"file_version": "brain.Event:2"}, start, *entries]
            with self._events.open("ab") as file:
                for entry in entries:
                    writer(file).write(event(wall_time=time.time(), **entry).SerializeToString())
        except Exception as error:
            self._tensorboard = False
            self.warn_not_written("events", "TensorBoard events are not being written", error)

    # resumption

    def state_dict(self) -> dict[str, Any]:
        """The position of the log, for the checkpoint of a loop that only measures.

        `AdaptiveBatch` has the position in its own state.
        """
        self.flush()
        return {
            "step": self._step,
            "samples": self._samples,
            "sizes": self._sizes,
            "elapsed_seconds": self._elapsed_seconds,
        }

    @loads_state
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the step of a saved state; the next row removes rows of later steps."""
        self._unwritten.clear()
        self.close()
        step, samples, sizes = int(state["step"]), int(state["samples"]), state.get("sizes")
        if min(step, samples) < 0:
            raise StateError(f"a state of step {step} and {samples} samples is not one of RunLog")
        self._sizes = None if sizes is None else (int(sizes[0]), int(sizes[1]))
        self._step, self._samples, self._lost_step = step, samples, 0
        self._earlier_seconds = float(state.get("elapsed_seconds", 0.0))
        self._started = time.perf_counter()
        self._continues = True

    @property
    def _elapsed_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started


def settings_json(settings: Mapping[str, Any]) -> bytes:
    """Text of settings.json: the settings, and what ran them."""
    document = {
        "schema": SCHEMA,
        "settings": dict(settings),
        "versions": {
            "bigbatch": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "machine": platform.platform(),
    }
    return dumps(document, indent=1).encode() + b"\n"


def _numbers(scores: Mapping[str, Value]) -> dict[str, float | None]:
    return {name: finite(_number(name, score)) for name, score in scores.items()}


def _number(name: str, value: Value) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise SettingError(f"{name}={shortened(value)} is not a number; log one number") from None
