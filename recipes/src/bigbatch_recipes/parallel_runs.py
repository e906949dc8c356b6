"""Trains the runs of a sweep by joblib, several at a time.

joblib's own processes train on this machine. Where a script has chosen another of its backends, by
`joblib.parallel_config("ray")` for example, the runs train where that starts them; all machines
need the folder of the sweep. Finished runs are skipped, and unfinished ones continue from their
checkpoints.
"""

import math
import os
import re
import signal
import time
import traceback
import warnings
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import cache
from multiprocessing import current_process
from pathlib import Path
from threading import Thread
from typing import Any

import joblib  # type: ignore[import-untyped]
import torch

from bigbatch.errors import BigbatchError, RunError
from bigbatch.log.atomic_files import lock_folder
from bigbatch.log.history import history_of
from bigbatch.setting_types import Count, check_setting
from bigbatch_recipes.console import LiveView, score_text
from bigbatch_recipes.run_config import PREREQUISITES, STUDY, read_sweep
from bigbatch_recipes.study import settings_from, train_directory
from bigbatch_recipes.sweep_results import read_sweep_results

LOG = "log.txt"  # in a run directory: the notes of its training, and an unexpected error

Trainings = Mapping[str, dict[str, Any]]


def train_sweep(path: Path, jobs: int | None, view: LiveView) -> dict[str, str]:
    """Trains the unfinished runs of the sweep at `path`, so many at a time.

    With tuning seeds, it trains those first, and then the best point of each combination alone. A
    run that fails stops no other, except those that begin from it.

    Args:
        path: directory of the sweep.
        jobs: runs at a time; None for one per GPU, or as many as the cores allow.
        view: prints a line for each run that ends, unless it is quiet.
    Returns:
        The reasons of the runs that failed, by name.
    Raises:
        RunError: `path` holds no sweep, another process runs it, or a worker process was killed.
        SettingError: fewer jobs than one.
    """
    trainings, sweep = read_sweep(path)
    tuning = {n: s for n, s in trainings.items() if s["seed"] in sweep["tuning_seeds"]}
    if not tuning:
        return _train_all(path, trainings, jobs, view)
    failures = _train_all(path, tuning, jobs, view)
    shown = {point.name for point in read_sweep_results(path).shown}
    best = {n: s for n, s in trainings.items() if n not in tuning and s["arm"] in shown}
    return failures | _train_all(path, best, jobs, view)


def _train_all(
    path: Path, trainings: Trainings, jobs: int | None, view: LiveView
) -> dict[str, str]:
    """Trains some runs of the study at `path`; returns the reasons of those that failed.

    In rounds: a run that needs another one is in a round after it.
    """
    for name, settings in trainings.items():
        settings_from(f"{path / STUDY}, training {name}", settings)
    jobs = check_setting("jobs", jobs or default_jobs(trainings.values()), Count)
    left = {n: s for n, s in trainings.items() if not is_finished(path / n)}
    failures: dict[str, str] = {}
    lock = lock_folder(path)
    try:
        while left:
            ready = {n: s for n, s in left.items() if not _required(s) & left.keys()} or left
            left = {n: s for n, s in left.items() if n not in ready}
            for name, settings in ready.items():
                if failed := sorted(_required(settings) & failures.keys()):
                    failures[name] = f"it needs {', '.join(failed)}, which failed"
            begun = {n: s for n, s in ready.items() if n not in failures}
            for name, error in _train_side_by_side(path, begun, jobs):
                if error:
                    failures[name] = error
                view.progress(f"{name}  {'failed' if error else _result_text(path / name)}")
    finally:
        os.close(lock)
    return failures


def _required(settings: Mapping[str, Any]) -> set[str]:
    return {settings[name] for name in PREREQUISITES}


def _train_side_by_side(path: Path, trainings: Trainings, jobs: int) -> Iterable[tuple[str, str]]:
    """Trains runs, so many at a time; yields name and error of each when it ends.

    Where the caller stops, as by an interrupt, joblib ends its processes.
    """
    gpus = tuple(_gpus_of(trainings.values()))
    parallel = joblib.Parallel(jobs, return_as="generator_unordered", batch_size=1)
    tasks = [joblib.delayed(_train)(path / n, s, gpus) for n, s in trainings.items()]
    try:
        with closing(parallel(tasks)) as outcomes:
            yield from outcomes
    except BrokenProcessPool as error:
        raise RunError(
            f"a process that trained was killed, often for lack of memory ({error}); "
            f"`bigbatch sweep --resume {path}` continues, with fewer --jobs if need be"
        ) from None


def _train(path: Path, settings: dict[str, Any], gpus: tuple[str, ...]) -> tuple[str, str]:
    """Trains one run in this process, from its checkpoint if it has one.

    Returns:
        Its name, and why it failed; "" where it did not.
    """
    _prepare_worker(gpus)
    view = LiveView(quiet=True)
    notes: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                train_directory(path, settings, view, path.name)
            finally:
                notes = [f"note: {note.message}\n" for note in caught]
        return path.name, ""
    except (BigbatchError, OSError) as error:
        return path.name, str(error)
    except Exception as error:
        notes.append(traceback.format_exc())
        return path.name, f"{type(error).__name__}: {error}"
    finally:
        if path.exists():
            (path / LOG).write_text("".join(notes))


@cache
def _prepare_worker(gpus: tuple[str, ...]) -> None:
    """Prepares a process of joblib: it has a GPU of its own, and ends with its parent.

    Elsewhere, in the caller's own process for example, nothing is done.
    """
    number = re.fullmatch(r"LokyProcess-(\d+)", current_process().name)
    if number is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(number[1]) % len(gpus)]
    Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _result_text(path: Path) -> str:
    history = history_of(path)
    scores = history.scored_rows[-1]["metrics"].items()
    texts = [score_text(name, math.nan if score is None else score) for name, score in scores]
    texts.append(f"{history.rows[-1]['elapsed_seconds']:.1f} s")
    return "  ".join(texts + ["diverged"] * bool(history.divergence))


def default_jobs(trainings: Collection[Mapping[str, Any]]) -> int:
    """Number of runs at a time: one per GPU, or as many as the cores allow."""
    threads = max(int(settings["threads"]) for settings in trainings)
    return len(_gpus_of(trainings)) or max(1, joblib.cpu_count() // threads)


def _gpus_of(trainings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The GPUs of these trainings, as CUDA_VISIBLE_DEVICES names them."""
    if not any(settings["device"] == "cuda" for settings in trainings):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def is_finished(path: Path) -> bool:
    """Whether the run at `path` is trained to its end, and its report is written."""
    try:
        return (path / "report.html").exists() and history_of(path).finished
    except RunError:
        return False  # the training reports what is wrong
