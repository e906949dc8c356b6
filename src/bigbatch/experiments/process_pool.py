"""The trainings of a study, several at a time, each alone in a process of its own.

A process trains one run directory, as `bigbatch train --resume` does, so whatever is killed goes on
from its checkpoint. What outlives a killed parent holds its directory, and is waited for.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout

from bigbatch.errors import RunError
from bigbatch.experiments.study import opened, settings_in
from bigbatch.runs.console import LiveView
from bigbatch.runs.metrics import history_of
from bigbatch.runs.run_config import BEFORE, read_trainings
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.runs.sweep_console import Counts, Followed, SweepConsole
from bigbatch.setting_types import Count, setting

LOG = "log.txt"  # in a run directory: what its process said

_POLL = 0.2  # seconds between two looks at the processes
_GRACE = 10.0  # seconds that a process has to end when it is told to


def train_side_by_side(path: Path, jobs: int | None, view: LiveView) -> dict[str, str]:
    """Trains what is not finished yet of the study at `path`, so many runs at a time.

    A run that fails stops no other, except those that begin from it.

    Args:
        path: of the study.
        jobs: processes at a time; None for as many as the cores, or the GPUs, have room for.
        view: where to show it.
    Returns:
        Why runs failed, by name.
    Raises:
        RunError: `path` holds no study, or another process runs it.
        SettingError: fewer jobs than one.
    """
    trainings = read_trainings(path)
    for name, settings in trainings.items():
        settings_in(f"{path / 'study.yaml'}, training {name}", settings)
    devices = [str(settings["device"]) for settings in trainings.values()]
    gpus = _gpus() if "cuda" in devices else []
    threads = max(int(settings["threads"]) for settings in trainings.values())
    if jobs is None:
        jobs = len(gpus) or max(1, _cores() // threads)
    setting("jobs", jobs, Count)
    try:
        with FileLock(path / ".lock", blocking=False), _ended_like_interrupted():
            return _Jobs(path, trainings, jobs, gpus).run(SweepConsole(view, path.name))
    except Timeout:
        raise RunError(f"{path} is in use by another process; wait for it") from None


@dataclass
class _Job:
    process: subprocess.Popen[bytes]
    run: RunDirectory
    slot: int


class _Jobs:
    """What waits, runs and has ended."""

    def __init__(
        self, path: Path, trainings: Mapping[str, dict[str, Any]], jobs: int, gpus: list[str]
    ) -> None:
        self._path, self._gpus, self._jobs = path, gpus, jobs
        self._waiting = dict(trainings)
        self._running: dict[str, _Job] = {}
        self._followed: dict[str, Followed] = {}
        self._finished: set[str] = set()
        self._failed: dict[str, str] = {}

    def run(self, overview: SweepConsole) -> dict[str, str]:
        for name in list(self._waiting):
            if is_finished(self._path / name):
                self._finished.add(name)
                del self._waiting[name]
        try:
            with overview.shown():
                while self._waiting or self._running:
                    self._collect(overview)
                    self._start(overview)
                    overview.update(self._followed, self._counts())
                    time.sleep(_POLL)
        finally:
            self._stop()
        return self._failed

    def _counts(self) -> Counts:
        return Counts(*map(len, (self._finished, self._failed, self._running, self._waiting)))

    def _collect(self, overview: SweepConsole) -> None:
        """What has ended since the last look."""
        for name, job in list(self._running.items()):
            status = job.process.poll()
            if status is None:
                continue
            del self._running[name]
            ended = self._followed.pop(name).ended()
            if status == 0:
                self._finished.add(name)
                overview.ended(f"{name} {ended}", self._counts())
            else:
                self._fail(name, _reason(job.run, status), overview)

    def _fail(self, name: str, reason: str, overview: SweepConsole) -> None:
        self._failed[name] = reason
        overview.ended(f"{name} failed: {reason}", self._counts())

    def _start(self, overview: SweepConsole) -> None:
        """What there is room for, and what it needs is done."""
        for name, settings in list(self._waiting.items()):
            before = {settings[one] for one in BEFORE}
            if lost := before & self._failed.keys():
                del self._waiting[name]
                self._fail(name, f"it needs {', '.join(lost)}, which failed", overview)
            elif not before & (self._waiting.keys() | self._running.keys()):
                try:
                    self._start_one(name, settings)
                except RunError as error:  # its directory is not as we left it
                    del self._waiting[name]
                    self._fail(name, str(error), overview)

    def _start_one(self, name: str, settings: dict[str, Any]) -> None:
        taken = {job.slot for job in self._running.values()}
        free = next((slot for slot in range(self._jobs) if slot not in taken), None)
        if free is None:
            return
        run = opened(self._path / name, settings)
        if not _is_free(run):
            return  # its process outlived the one that started it
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[free % len(self._gpus)]
        with (run.path / LOG).open("wb") as log:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "bigbatch", "train", "--quiet", "--resume", str(run.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                start_new_session=True,  # an interrupt from the keyboard is for the parent
            )
        self._running[name] = _Job(process, run, free)
        self._followed[name] = Followed(run)
        del self._waiting[name]

    def _stop(self) -> None:
        """Ends what runs; each goes on from its checkpoint another time."""
        for job in self._running.values():
            job.process.terminate()
        for job in self._running.values():
            try:
                job.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()


def is_finished(path: Path) -> bool:
    """Whether the run at `path` is trained to its end, and its report is written."""
    if not (path / "report.html").exists():
        return False
    try:
        return history_of(RunDirectory.open(path)).finished
    except RunError:
        return False  # its own process says what is wrong


def _is_free(run: RunDirectory) -> bool:
    try:
        with run.locked():
            return True
    except RunError:
        return False


def _reason(run: RunDirectory, status: int) -> str:
    """Why a process failed: the last line that it said, but for its notes."""
    lines = (run.path / LOG).read_text(errors="replace").splitlines()
    said = [line for line in lines if line.strip() and not line.startswith("bigbatch: note:")]
    by = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return said[-1].strip().removeprefix("bigbatch: ") if said and status > 0 else by


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """In here, being told to end is an interrupt, so that no process is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
