"""The trainings behind `estimate_accuracy`, and the numbers that are kept of each."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from bigbatch.policies.goodput import Goodput
from bigbatch.policies.policy import Fixed, NoiseScale, SimiGrad
from bigbatch.setting_types import Count, check_setting
from bigbatch.statistics.noise_scale import GradientStatistics
from studies.results.tracked_training import (
    FIXED_BATCH,
    WIDTH,
    Arm,
    Samples,
    Tracked,
    Training,
    averaged,
    mean_statistics,
    read_samples,
    train_tracked,
)
from studies.results.tracking_error import SHIFTS, TrackingError, tracking_error

Log = dict[str, Any]

SEEDS = range(5)
FIXED_WAYS, POLICY_WAYS = (2, 4, 8, 16), (4, 16)  # micro-batches
GROUPS = 8
BRANCH_STEPS = (50, 125, 200)  # before which branches are tested

_SAMPLES = 63 * FIXED_BATCH  # whole steps, so that a pass has no smaller one
_PASSES = 4
_FIRST = SHIFTS[-1]  # the first step that counts
_OVERHEAD = 256.0  # of Goodput
_WINDOWS = ("16 steps", "auto")
_BRANCH_SIZES = [64, 128, 256, 512]
_BRANCH_SAMPLES, _BRANCH_REPEATS, _HELD_ASIDE = 5120, 5, 640
_BRANCH_TOTAL, _BRANCH_TRUTH, _BRANCH_EVERY = 28_000, 24_000, 4  # samples, exact ones; steps
_MOST_SHARE = 100.0  # of the samples seen, that a branch test may cost


def fixed_arms() -> list[Arm]:
    """One batch size, measured in five ways."""
    fixed = Fixed(FIXED_BATCH)
    return [*(Arm(fixed, k) for k in FIXED_WAYS), Arm(fixed, GROUPS, by_groups=True)]


def policy_arms() -> list[Arm]:
    """Three policies, each with two numbers of micro-batches."""
    return [
        arm
        for k in POLICY_WAYS
        for arm in (
            Arm(SimiGrad(0.2), k),
            Arm(NoiseScale(1.0), k, "16 steps"),
            Arm(Goodput(_OVERHEAD), k),
        )
    ]


def train(data: Path | None, jobs: int) -> Log:
    """Trains every arm with every seed.

    Args:
        data: a folder with Fashion-MNIST; None for scikit-learn's digits, without branch tests,
            which need more samples.
        jobs: processes at a time, one seed each.
    Returns:
        The log, of numbers, text and lists alone.
    Raises:
        RunError: the files are not in `data`.
        SettingError: fewer jobs than one.
    """
    check_setting("jobs", jobs, Count)
    started = time.perf_counter()
    tasks = [(data, seed) for seed in SEEDS]
    if jobs == 1:
        parts = [_of_seed(task) for task in tasks]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(_of_seed, tasks))
    return {
        "data": "scikit-learn's digits" if data is None else "Fashion-MNIST",
        "seeds": list(SEEDS),
        "runs": [run for part in parts for run in part["runs"]],
        "branches": [test for part in parts for test in part["branches"]],
        "example": parts[0]["example"],
        "cpu_seconds": round(math.fsum(part["cpu_seconds"] for part in parts)),
        "wall_seconds": round(time.perf_counter() - started),
        "jobs": jobs,
    }


def _of_seed(task: tuple[Path | None, int]) -> Log:
    """Everything of one seed, on one thread."""
    data, seed = task
    threads, started = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)
    try:
        samples = read_samples(data)
        branches = [] if data is None else list(_branch_tests(samples, seed))
        samples = samples.first(min(_SAMPLES, len(samples) // FIXED_BATCH * FIXED_BATCH))
        total = _PASSES * _SAMPLES
        runs, example = _compare(samples, total, seed)
    finally:
        torch.set_num_threads(threads)
    seconds = time.process_time() - started
    return {"runs": runs, "branches": branches, "example": example, "cpu_seconds": seconds}


def _compare(samples: Samples, total: int, seed: int) -> tuple[list[Log], Log]:
    """Every arm of one seed, and series for the figure."""
    runs, example, truth = [], {}, None
    for arm in (*fixed_arms(), *policy_arms()):
        is_fixed = isinstance(arm.policy, Fixed)
        tracked = train_tracked(samples, total, seed, arm, truth if is_fixed else None)
        truth = truth or tracked.truth
        runs.append({"seed": seed, "arm": arm.name, **measures(tracked)})
        if arm.micro_batches == POLICY_WAYS[0]:
            example[arm.name] = _series(tracked)
    return runs, example


# measures of one training


def measures(tracked: Tracked) -> Log:
    """Numbers of one training: of single steps, of averages, and of the batch under a policy."""
    arm, centered = tracked.arm, _logs(tracked.centered())
    exact, estimates = tracked.exact(), tracked.estimates
    is_fixed = isinstance(arm.policy, Fixed)
    windows = _WINDOWS if is_fixed else (arm.smoothing or "",)
    numbers = {
        "steps": len(tracked.records),
        "loss": _number(tracked.records[-1].loss),
        "truth_error": _number(_median(tracked.truth.errors)),
        "step": _step_errors(tracked),
        "averages": {
            window: _pair(
                _logs(averaged(estimates, window)), _logs(averaged(exact, window)), centered
            )
            for window in windows
        },
    }
    if not is_fixed:
        oracle = _ln(tracked.followed(tracked.centered(), averages=False))
        numbers["batch"] = _pair(_ln(tracked.decided), _ln(tracked.followed(exact)), oracle)
    return numbers


def _step_errors(tracked: Tracked) -> Log:
    """Errors of single steps, at those whose truth was measured."""
    pairs = [
        (tracked.estimates[step], GradientStatistics(truth.grad_sqnorm, truth.grad_variance, n, n))
        for step, truth in zip(tracked.truth.steps, tracked.truth.statistics, strict=True)
        if step >= _FIRST
        for n in (tracked.batch_sizes[step],)
    ]
    similarity = tracking_error(
        [estimate.similarity for estimate, _ in pairs], [truth.similarity for _, truth in pairs], 0
    )
    scale = tracking_error(_logs(one for one, _ in pairs), _logs(one for _, one in pairs), 0)
    return {
        "signal": _number(_excess([(one.grad_sqnorm, other.grad_sqnorm) for one, other in pairs])),
        "noise": _number(
            _excess([(one.grad_variance, other.grad_variance) for one, other in pairs])
        ),
        "similarity": _number(fmean(truth.similarity for _, truth in pairs)),
        "similarity_bias": _number(similarity.bias),
        "similarity_scatter": _number(similarity.scatter),
        "failures": scale.failures,
        "compared": scale.steps,
        "scale_bias": _number(scale.bias),
        "scale_scatter": _number(scale.scatter),
    }


def _excess(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean estimate over mean truth, less 1."""
    return math.fsum(one for one, _ in pairs) / math.fsum(other for _, other in pairs) - 1


def _pair(estimate: Sequence[float], exact: Sequence[float], truth: Sequence[float]) -> Log:
    """Errors of an estimate, and of what exact values would give in its place."""
    return {
        "estimate": _errors(tracking_error(estimate, truth, _FIRST)),
        "exact": _errors(tracking_error(exact, truth, _FIRST)),
    }


def _errors(error: TrackingError) -> Log:
    return {
        "bias": _number(error.bias),
        "scatter": _number(error.scatter),
        "rms": _number(error.rms),
        "lag": _number(error.lag),
        "failures": error.failures,
        "compared": error.steps,
    }


def _series(tracked: Tracked) -> Log:
    """Series for the figure."""
    if isinstance(tracked.arm.policy, Fixed):
        statistics = {
            "exact": tracked.exact(),
            "truth": tracked.centered(),
            "average": averaged(tracked.estimates, _WINDOWS[0]),
        }
        return {name: _numbers(one.noise_scale for one in row) for name, row in statistics.items()}
    return {"truth": tracked.followed(tracked.centered(), averages=False), "batch": tracked.decided}


def _branch_tests(samples: Samples, seed: int) -> Iterator[Log]:
    """Branch tests of one training, with the exact noise scale around each."""
    training = Training(samples, _BRANCH_TOTAL, seed, Arm(Fixed(FIXED_BATCH), POLICY_WAYS[0]))
    known, results = samples.first(_BRANCH_TRUTH), {}
    exact: dict[int, list[tuple[GradientStatistics, float]]] = {at: [] for at in BRANCH_STEPS}
    for step in training.states():
        for at in BRANCH_STEPS:
            if abs(step - at) <= WIDTH and (step - at) % _BRANCH_EVERY == 0:
                exact[at].append(training.exact(known))
        if step in BRANCH_STEPS:
            results[step] = training.loop.branch_test(
                training.loss_of,
                _BRANCH_SIZES,
                samples=_BRANCH_SAMPLES,
                repeats=_BRANCH_REPEATS,
                held_aside=_HELD_ASIDE,
                share=_MOST_SHARE,
            )
    for step, result in results.items():
        truth = mean_statistics([one for one, _ in exact[step]])
        yield {
            "seed": seed,
            "step": step,
            "critical_batch": _number(result.critical_batch),
            "low": _number(result.interval[0]),
            "high": _number(result.interval[1]),
            "measured_scale": _number(result.noise_scale),
            "true_scale": _number(truth.noise_scale),
            "true_error": _number(_median([error for _, error in exact[step]])),
            "reason": result.reason,
        }


def _logs(statistics: Iterable[GradientStatistics]) -> list[float]:
    """ln B_simple; not finite where the signal is not positive."""
    return _ln(one.noise_scale for one in statistics)


def _ln(values: Iterable[float]) -> list[float]:
    return [math.log(value) if value > 0 else math.nan for value in values]


def _numbers(values: Iterable[float]) -> list[Any]:
    return [_number(value) for value in values]


def _median(values: Sequence[float]) -> float:
    """The median of those that are finite."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _number(value: float) -> Any:
    """Four digits for a log: None for nan, "inf" for an infinite number."""
    if math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else "inf"
