"""The sweep that judges an advised batch size: every size at its own best rate, and the advice.

Trainings run side by side, since only their numbers of steps count. Steps are timed afterwards in
one process, and so is the advice measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import bigbatch as bb
from bigbatch.errors import RunError
from studies.advice_results import Advised, Results, SizeResult, WorkloadResult, about, read_results
from studies.advice_verdict import Verdict
from studies.advice_workloads import SIZES, WORKLOADS, Workload
from studies.target_training import TARGET, Result, TargetTraining
from studies.timing import Times, interleaved_times

_RATIO = 2**0.5  # of neighbouring rates
_REPEAT_SECONDS = 0.01  # of one timed repeat, and at least one step


@dataclass(frozen=True)
class Plan:
    """What a sweep runs; the defaults are the rule of docs/decisions/0020.

    Args:
        sizes_used: which of a workload's sizes; the present one is always used.
        max_sizes: sizes of a workload, with those that are added at an edge.
        rates: learning rates of each size at first, an odd number.
        max_rates: rates of each size, with those that are added at an edge.
        tuning_seeds: choose the rate.
        fresh_seeds: give the cost.
        advice_seeds: trainings that advise a size.
        rounds: timed repeats of each size.
    """

    sizes_used: tuple[int, ...] = tuple(range(SIZES))
    max_sizes: int = 21
    rates: int = 5
    max_rates: int = 11
    tuning_seeds: tuple[int, ...] = (10, 11)
    fresh_seeds: tuple[int, ...] = tuple(range(8))
    advice_seeds: tuple[int, ...] = (20, 21, 22)
    rounds: int = 40

    def sizes(self, workload: Workload) -> list[int]:
        """The sizes of the sweep, and the present one."""
        sizes = workload.sizes()
        return sorted({*(sizes[place] for place in self.sizes_used), workload.present})


QUICK = Plan(  # with seeds of its own
    sizes_used=(7,),
    max_sizes=2,
    rates=1,
    max_rates=1,
    tuning_seeds=(90,),
    fresh_seeds=(91,),
    advice_seeds=(92,),
    rounds=5,
)


def empty_results(names: Iterable[str], plan: Plan) -> Results:
    """Results of these workloads, without a measurement."""
    return {
        name: WorkloadResult(name, WORKLOADS[name].present, plan.sizes(WORKLOADS[name]))
        for name in names
    }


def begin(names: Sequence[str], plan: Plan, out: Path | None) -> tuple[dict[str, Any], Results]:
    """What the file has already, with empty results of the other workloads, and what it is about.

    Raises:
        RunError: the file is of another plan, or not of this command.
    """
    description = about(asdict(plan))
    results = empty_results(names, plan)
    if out is None or not out.exists():
        return description, results
    written, known = read_results(out)
    if changed := [key for key in description if description[key] != written.get(key)]:
        raise RunError(f"{out} has results with another {', '.join(changed)}; give another name")
    return description, results | known


def run(results: Results, plan: Plan, jobs: int) -> Iterator[str]:
    """Runs what is missing in the results, and yields a line after each part.

    Args:
        results: by workload; those that are there are kept.
        plan: seeds, sizes and rates.
        jobs: trainings at a time.
    """
    torch.set_num_threads(1)
    tasks = _missing(results)
    while True:
        yield from _train(tasks, results, plan, jobs)
        yield from _time(results, plan)
        for result in results.values():
            widen(result, plan)
        if not (tasks := _missing(results)):
            break
    for name, result in results.items():
        if not result.advice:
            result.advice = _advice(WORKLOADS[name], result.sizes[result.present].rate, plan)
            yield f"{name}: advice"
    extra = [(name, one.advised) for name, one in results.items()]
    tasks = [(n, size) for n, size in extra if size and size not in results[n].sizes]
    yield from _train(tasks, results, plan, jobs)
    yield from _time(results, plan)


def _missing(results: Results) -> list[tuple[str, int]]:
    return [
        (name, size)
        for name, result in results.items()
        for size in result.sweep
        if size not in result.sizes
    ]


def widen(result: WorkloadResult, plan: Plan) -> None:
    """Adds two sizes to a sweep beyond an edge that is the best size, within the plan's limit."""
    best, sweep = Verdict(result).best, sorted(result.sweep)
    if len(sweep) + 2 > plan.max_sizes or best not in (sweep[0], sweep[-1]):
        return
    factors = (2, 2**0.5) if best == sweep[-1] else (0.5, 0.5**0.5)
    result.sweep = sorted({*sweep, *(max(1, round(best * factor)) for factor in factors)})


def _time(results: Results, plan: Plan) -> Iterator[str]:
    """Times all sizes of a workload again where a new one was trained."""
    for name, result in results.items():
        if set(result.seconds) != set(result.sizes):
            result.seconds = seconds_of_steps(WORKLOADS[name], sorted(result.sizes), plan.rounds)
            yield f"{name}: times"


def _train(tasks: list[tuple[str, int]], results: Results, plan: Plan, jobs: int) -> Iterator[str]:
    for name, result in _side_by_side(tasks, plan, jobs):
        results[name].sizes[result.batch_size] = result
        yield f"{name}: {result.batch_size}"


def _side_by_side(
    tasks: list[tuple[str, int]], plan: Plan, jobs: int
) -> Iterator[tuple[str, SizeResult]]:
    """The results of the tasks as they end, so many at a time."""
    if jobs == 1 or not tasks:
        yield from ((name, _size_result(name, size, plan)) for name, size in tasks)
        return
    context = get_context("spawn")  # a forked process may hang in torch's threads
    with ProcessPoolExecutor(jobs, context, partial(torch.set_num_threads, 1)) as pool:
        futures = {pool.submit(_size_result, name, size, plan): name for name, size in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _size_result(name: str, batch_size: int, plan: Plan) -> SizeResult:
    return train_size(WORKLOADS[name], batch_size, plan)


def train_size(workload: Workload, batch_size: int, plan: Plan) -> SizeResult:
    """Tunes the rate of a batch size, and trains at the best one with fresh seeds."""

    def train(rate: float, seed: int, limit: int | None = None) -> Result:
        return TargetTraining(workload, rate, seed).to_target(batch_size, limit)

    rate, tuning = tuned(workload.first_rate(batch_size), plan, train)
    fresh = [] if rate is None else [train(rate, seed) for seed in plan.fresh_seeds]
    return SizeResult(batch_size, rate, tuning, fresh)


def tuned(
    center: float, plan: Plan, train: Callable[[float, int, int | None], Result]
) -> tuple[float | None, list[Result]]:
    """The rate with the fewest steps on the tuning seeds, and the trainings that chose it.

    The grid grows by a rate at its edge while the best one is there, and at both edges while every
    rate fails. A training that can no longer be the best one is given up, which changes no choice.

    Args:
        center: the middle of the grid.
        plan: number of rates, and the seeds.
        train: trains with a rate, a seed and a limit of the steps.
    """
    totals: dict[int, float] = {}
    trained: list[Result] = []
    half = plan.rates // 2
    waiting = sorted(range(-half, half + 1), key=abs)
    while waiting:
        least = min(totals.values(), default=math.inf)
        place = waiting.pop(0)
        runs = _of_rate(center * _RATIO**place, plan, train, least)
        trained += runs
        totals[place] = sum(one.steps if one.end == TARGET else math.inf for one in runs)
        if not waiting and len(totals) < plan.max_rates:
            waiting = _beyond_edges(totals)
    best = min(totals, key=lambda place: (totals[place], abs(place)))
    return (center * _RATIO**best if totals[best] < math.inf else None), trained


def _of_rate(
    rate: float, plan: Plan, train: Callable[[float, int, int | None], Result], least: float
) -> list[Result]:
    """Trainings of one rate on the tuning seeds, until one fails or they exceed the least total."""
    runs: list[Result] = []
    for seed in plan.tuning_seeds:
        left = least - sum(one.steps for one in runs)
        runs.append(train(rate, seed, None if math.isinf(left) else int(left)))
        if runs[-1].end != TARGET:
            break
    return runs


def _beyond_edges(totals: dict[int, float]) -> list[int]:
    """Places beyond the edges at which the best total is."""
    low, high = min(totals), max(totals)
    least = min(totals.values())
    beyond = [low - 1] if totals[low] == least else []
    return [*beyond, high + 1] if totals[high] == least else beyond


def _advice(workload: Workload, rate: float | None, plan: Plan) -> list[Advised]:
    """The advice of trainings at the present batch size and its tuned rate."""
    if rate is None:
        return [Advised(seed, None, None) for seed in plan.advice_seeds]
    return [advised(workload, rate, seed) for seed in plan.advice_seeds]


def advised(workload: Workload, rate: float, seed: int) -> Advised:
    """Trains to the target at the present batch size, and takes the advice for this machine."""
    training = TargetTraining(workload, rate, seed)
    with bb.advise(training.model, training.optimizer, steps=None, budget=None) as advice:
        training.to_target(workload.present)
    noise_scale = advice.noise_scale if math.isfinite(advice.noise_scale) else None
    return Advised(seed, advice.batch_size, noise_scale)


def seconds_of_steps(workload: Workload, sizes: Iterable[int], rounds: int) -> dict[int, Times]:
    """Median seconds of a step of each size, without evaluations; the sizes are timed in turn."""
    sizes = list(sizes)
    training = TargetTraining(workload, rate=0.0, seed=0)
    counts = [_steps_of_a_repeat(training, size) for size in sizes]
    runs = [
        partial(_steps, training, size, count) for size, count in zip(sizes, counts, strict=True)
    ]
    columns = zip(*interleaved_times(runs, rounds), strict=True)
    return {
        size: Times(
            median(one.wall for one in column) / count, median(one.cpu for one in column) / count
        )
        for size, count, column in zip(sizes, counts, columns, strict=True)
    }


def _steps_of_a_repeat(training: TargetTraining, batch_size: int) -> int:
    (times,), (again,) = interleaved_times([partial(_steps, training, batch_size, 1)], 2)
    return max(1, round(_REPEAT_SECONDS / min(times.wall, again.wall)))


def _steps(training: TargetTraining, batch_size: int, count: int) -> None:
    for _ in range(count):
        training.step(batch_size)
