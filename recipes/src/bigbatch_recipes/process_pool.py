"""Trains the runs of a study, several at a time, each in a process of its own.

A process trains one run directory, as `bigbatch train --resume` does, so a killed one resumes from
its checkpoint. A process that outlives its parent keeps its directory locked, and is waited for.
On Linux the processes are forked from a server that has imported torch and the recipes, which
takes seconds each time.
"""

import asyncio
import os
import runpy
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import lock_folder
from bigbatch.log.history import history_of
from bigbatch.setting_types import Count, check_setting
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.run_config import PREREQUISITES, read_trainings
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.study import open_or_create_run, settings_from
from bigbatch_recipes.sweep_console import RunFollower, SweepConsole, TrainingCounts
from bigbatch_recipes.sweep_results import SweepResults, read_sweep_results

LOG = "log.txt"  # in a run directory: the standard error of its process

_POLL_SECONDS = 0.2  # between two updates of the console
_WAIT_SECONDS = 0.05  # between two looks at a process
_GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL

_PRELOADED = (
    "bigbatch_recipes.cli.train_command",
    "torch._dynamo",
)  # torch.optim imports the latter

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

Environment = dict[str, str]


def train_sweep(
    path: Path, jobs: int | None, view: LiveView, deadline: float | None = None
) -> dict[str, str]:
    """Trains the unfinished runs of the sweep at `path`, so many at a time.

    With tuning seeds, it trains those first, and then the best point of each combination alone. A
    run that fails stops no other, except those that begin from it. Runs that the deadline stops
    resume from their checkpoints, as after an interruption.

    Args:
        path: directory of the sweep.
        jobs: number of processes at a time; None for one per GPU, or as many as the cores allow.
        view: shows the progress.
        deadline: value of `time.monotonic()` at which running processes are ended, which takes at
            most ten seconds, and after which none begins; None for none.
    Returns:
        The reasons of the runs that failed, by name.
    Raises:
        RunError: `path` holds no sweep, or another process runs it.
        SettingError: fewer jobs than one.
    """
    tuning_seeds, trainings = _results(path).tuning_seeds, read_trainings(path)
    if not tuning_seeds:
        return _train_side_by_side(path, trainings, jobs, view, deadline)
    tuning = {n: s for n, s in trainings.items() if s["seed"] in tuning_seeds}
    failures = _train_side_by_side(path, tuning, jobs, view, deadline)
    if _is_past(deadline):  # what is tuned so far chooses nothing
        return failures
    shown = {point.name for point in _results(path).shown}
    best = {n: s for n, s in trainings.items() if n not in tuning and s["arm"] in shown}
    return failures | _train_side_by_side(path, best, jobs, view, deadline)


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _results(path: Path) -> SweepResults:
    results = read_sweep_results(path)
    if results is None:
        raise RunError(f"{path} holds no sweep; name a directory that `bigbatch sweep` made")
    return results


def _train_side_by_side(
    path: Path,
    trainings: Mapping[str, dict[str, Any]],
    jobs: int | None,
    view: LiveView,
    deadline: float | None,
) -> dict[str, str]:
    """Trains some of the runs of the study at `path`; returns the reasons of those that failed."""
    for name, settings in trainings.items():
        settings_from(f"{path / 'study.yaml'}, training {name}", settings)
    gpus = _gpus_of(trainings.values())
    jobs = default_jobs(trainings.values()) if jobs is None else jobs
    check_setting("jobs", jobs, Count)
    slots = [{"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {} for n in range(jobs)]
    try:
        with FileLock(path / ".lock", blocking=False), _sigterm_interrupts():
            pool = _ProcessPool(path, trainings, slots, SweepConsole(view, path.name))
            asyncio.run(pool.train(deadline))
            return pool.failures
    except Timeout:
        raise RunError(f"{path} is in use by another process; wait for it") from None


class _ProcessPool:
    """One task per training: it waits for the runs it needs, for a slot, and for its process.

    Args:
        path: directory of the study.
        trainings: settings by the name of the run.
        slots: environment variables of each process that may run at a time.
        console: shows the progress.
    """

    def __init__(
        self,
        path: Path,
        trainings: Mapping[str, dict[str, Any]],
        slots: list[Environment],
        console: SweepConsole,
    ) -> None:
        self._path, self._trainings, self._console = path, trainings, console
        self._slots: asyncio.Queue[Environment] = asyncio.Queue()
        for slot in slots:
            self._slots.put_nowait(slot)
        self._context = _context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, RunFollower] = {}
        self._finished = {name for name in trainings if is_finished(path / name)}
        self.failures: dict[str, str] = {}

    async def train(self, deadline: float | None) -> None:
        """Trains all until their ends or the deadline."""
        for name in self._trainings:
            if name not in self._finished:
                self._tasks[name] = asyncio.create_task(self._train_one(name))
        pending = set(self._tasks.values())
        with self._console.live():
            while pending and not _is_past(deadline):
                done, pending = await asyncio.wait(pending, timeout=_POLL_SECONDS)
                for task in done:
                    task.result()
                self._console.update(self._running, self._counts())
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)  # until their processes are ended

    async def _train_one(self, name: str) -> None:
        required_runs = {self._trainings[name][setting_name] for setting_name in PREREQUISITES}
        if tasks := [self._tasks[run] for run in required_runs & self._tasks.keys()]:
            await asyncio.wait(tasks)
        if failed := required_runs & self.failures.keys():
            self._fail(name, f"it needs {', '.join(failed)}, which failed")
            return
        slot = await self._slots.get()
        try:
            run = open_or_create_run(self._path / name, self._trainings[name])
            status = await self._run_process(run, slot)
        except RunError as error:  # the directory is damaged
            self._fail(name, str(error))
            return
        finally:
            self._slots.put_nowait(slot)
        result = self._running.pop(name).outcome()
        if status != 0:
            self._fail(name, _failure_reason(run, status))
            return
        self._finished.add(name)
        self._console.print_ended(f"{name} {result}", self._counts())

    async def _run_process(self, run: RunDirectory, slot: Environment) -> int:
        while not _is_unlocked(run):  # its process outlived an earlier parent
            await asyncio.sleep(_POLL_SECONDS)
        threads = {"OMP_NUM_THREADS": str(self._trainings[run.name]["threads"])}
        (run.path / LOG).write_bytes(b"")
        environment = {**os.environ, **threads, **slot}
        process = self._context.Process(target=_train, args=(run.path, environment))
        try:
            with _signals_blocked(), _main_hidden():
                process.start()
            self._running[run.name] = RunFollower(run)
            while (status := process.exitcode) is None:
                await asyncio.sleep(_WAIT_SECONDS)
            return status
        finally:
            if process.pid is not None:
                await _terminate(process)

    def _fail(self, name: str, reason: str) -> None:
        self.failures[name] = reason
        self._console.print_ended(f"{name} failed: {reason}", self._counts())

    def _counts(self) -> TrainingCounts:
        finished, failed, running = map(len, (self._finished, self.failures, self._running))
        waiting = len(self._trainings) - finished - failed - running
        return TrainingCounts(finished, failed, running, waiting)


def _context() -> ForkServerContext | SpawnContext:
    """The context of new processes; elsewhere than on Linux, forked ones may fail."""
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """In here interrupts and SIGTERM wait, so that a process that starts is not lost.

    The server inherits this: a signal to the whole group leaves it alive, to report the status of
    the processes, which the parent ends.
    """
    resource_tracker.ensure_running()  # unblocks them where it is not running yet
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *_ENDING])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """In here a process starts that does not import the caller's script, which would train too."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _train(path: Path, environment: Environment) -> None:
    """Resumes the run at `path` in this process, whose standard error becomes its log."""
    os.setsid()  # Ctrl-C interrupts the parent alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *_ENDING])
    os.environ |= environment
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(path / LOG, os.O_WRONLY)
    for stream, file in ((0, null), (1, null), (2, log)):
        os.dup2(file, stream)
    sys.argv = ["bigbatch", "train", "--quiet", "--resume", str(path)]
    runpy.run_module("bigbatch", run_name="__main__", alter_sys=True)


async def _terminate(process: BaseProcess) -> None:
    """Ends a process that still runs: SIGTERM, and SIGKILL where that does not end it in time."""
    if process.exitcode is None:
        process.terminate()
        deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
        while process.exitcode is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_WAIT_SECONDS)
        process.kill()
    process.join()


def default_jobs(trainings: Collection[Mapping[str, Any]]) -> int:
    """Number of processes at a time: one per GPU, or as many as the cores allow."""
    threads = max(int(settings["threads"]) for settings in trainings)
    return len(_gpus_of(trainings)) or max(1, _core_count() // threads)


def _gpus_of(trainings: Iterable[Mapping[str, Any]]) -> list[str]:
    uses_gpus = any(settings["device"] == "cuda" for settings in trainings)
    return _visible_gpus() if uses_gpus else []


def is_finished(path: Path) -> bool:
    """Whether the run at `path` is trained to its end, and its report is written."""
    try:
        return (path / "report.html").exists() and history_of(path).finished
    except RunError:
        return False  # its own process reports what is wrong


def _is_unlocked(run: RunDirectory) -> bool:
    try:
        os.close(lock_folder(run.path))
    except RunError:
        return False
    return True


def _failure_reason(run: RunDirectory, status: int) -> str:
    """The last line of the process's log, without notes; else its exit status or signal."""
    if status < 0:
        return f"killed by signal {-status}"
    lines = (run.path / LOG).read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.strip() and not line.startswith("bigbatch: note:")]
    return errors[-1].strip().removeprefix("bigbatch: ") if errors else f"exit status {status}"


def _core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """In here SIGTERM and SIGHUP raise KeyboardInterrupt, so that no process outlives this one."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
