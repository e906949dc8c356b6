"""The trainings of a study, several at a time, each alone in a process of its own.

A process trains one run directory, as `bigbatch train --resume` does, so a killed one
resumes from its checkpoint. What outlives a killed parent holds its directory, and is waited for.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout

from bigbatch.errors import RunError
from bigbatch.experiments.study import opened, settings_in
from bigbatch.runs.console import LiveView
from bigbatch.runs.metrics import history_of
from bigbatch.runs.run_config import PREREQUISITES, read_trainings
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.runs.sweep_console import RunFollower, SweepConsole, TrainingCounts
from bigbatch.setting_types import Count, check_setting

LOG = "log.txt"  # in a run directory: what its process said

_POLL = 0.2  # seconds between two looks at the processes
_GRACE = 10.0  # seconds that a process has to end


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
    check_setting("jobs", jobs, Count)
    try:
        with FileLock(path / ".lock", blocking=False), _ended_like_interrupted():
            slots = [_device(number, gpus) for number in range(jobs)]
            sweep = _Sweep(path, trainings, slots, SweepConsole(view, path.name))
            asyncio.run(sweep.train())
            return sweep.failed
    except Timeout:
        raise RunError(f"{path} is in use by another process; wait for it") from None


class _Sweep:
    """One task a training: it waits for what it needs, then for a slot, then for its process."""

    def __init__(
        self,
        path: Path,
        trainings: Mapping[str, dict[str, Any]],
        slots: list[dict[str, str]],
        overview: SweepConsole,
    ) -> None:
        self._path, self._trainings, self._overview = path, trainings, overview
        self._slots: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        for slot in slots:
            self._slots.put_nowait(slot)
        self._followed: dict[str, RunFollower] = {}
        self._finished = {name for name in trainings if is_finished(path / name)}
        self.failed: dict[str, str] = {}

    async def train(self) -> None:
        unfinished = [name for name in self._trainings if name not in self._finished]
        tasks: dict[str, asyncio.Task[None]] = {}
        for name in unfinished:
            tasks[name] = asyncio.create_task(self._train_one(name, tasks))
        pending = set(tasks.values())
        with self._overview.live():
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_POLL)
                for task in done:
                    task.result()
                self._overview.update(self._followed, self._counts())

    async def _train_one(self, name: str, tasks: Mapping[str, asyncio.Task[None]]) -> None:
        needed = {self._trainings[name][one] for one in PREREQUISITES}
        if unfinished := [tasks[one] for one in needed & tasks.keys()]:
            await asyncio.wait(unfinished)
        if failed := needed & self.failed.keys():
            self._fail(name, f"it needs {', '.join(failed)}, which failed")
            return
        slot = await self._slots.get()
        try:
            run = opened(self._path / name, self._trainings[name])
            status = await self._run_process(run, slot)
        except RunError as error:  # its directory is not as we left it
            self._fail(name, str(error))
            return
        finally:
            self._slots.put_nowait(slot)
        ended = self._followed.pop(name).outcome()
        if status != 0:
            self._fail(name, _reason(run, status))
            return
        self._finished.add(name)
        self._overview.print_ended(f"{name} {ended}", self._counts())

    async def _run_process(self, run: RunDirectory, slot: dict[str, str]) -> int:
        while not _is_free(run):  # its process outlived the one that started it
            await asyncio.sleep(_POLL)
        threads = {"OMP_NUM_THREADS": str(self._trainings[run.name]["threads"])}
        with (run.path / LOG).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bigbatch", "train", "--quiet", "--resume", str(run.path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **threads, **slot},
                start_new_session=True,  # an interrupt from the keyboard is for the parent
            )
        self._followed[run.name] = RunFollower(run)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self._overview.print_ended(f"{name} failed: {reason}", self._counts())

    def _counts(self) -> TrainingCounts:
        ended, running = len(self._finished) + len(self.failed), len(self._followed)
        waiting = len(self._trainings) - ended - running
        return TrainingCounts(len(self._finished), len(self.failed), running, waiting)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a training, which resumes from its checkpoint another time."""
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _GRACE)
    except TimeoutError:
        process.kill()
        await process.wait()


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
        with run.lock():
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


def _device(slot: int, gpus: list[str]) -> dict[str, str]:
    """The environment of a slot: its GPU, in turn."""
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """In here, SIGTERM is an interrupt, so that no process is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
