"""How much longer each policy takes than the best schedule, on noisy quadratics.

python -m studies.decisions --rates greedy --noises proportional --beds 2
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller
from bigbatch.policies.goodput import Goodput, LossTrend
from bigbatch.policies.lr_policies import LateSwitch, Seesaw
from bigbatch.policies.policy import (
    MAX_CHANGE,
    Fixed,
    NoiseScale,
    Policy,
    SimiGrad,
    TrainingState,
    needs_of,
)
from bigbatch.policies.step_time import StepTimes
from studies.markdown_tables import Row, show
from studies.noisy_quadratic import (
    BASE_BATCH,
    NOISES,
    RATES,
    Array,
    Bed,
    Moment,
    Noise,
    Optimizer,
    Rate,
    Rule,
    last_part,
)
from studies.optimal_schedule import Outcome, knots, optimal_schedule, with_best_rate

_SEEDS = 3

_MICRO_BATCHES = 8  # k
_FIRST_SHARE = 8  # of the best fixed batch size, that of the first batch size
_MAX_GROWTH = 64  # of a doubling schedule
_MAX_BATCH = 2**24
_MAX_STEPS = 20_000
_DIVERGED = 1e6  # relative loss
_WORSE = 2  # candidates worse than the best one, after which the next ones are not tried
_TUNING = 1000  # what a tuning seed is larger
_TRIED = ((1.0, 1.0), (1.0, 1.5), (0.7, 1.0), (0.7, 1.5), (0.5, 1.5), (0.5, 2.5))  # of rate, length
_TIME_SCATTER, _PAUSES, _PAUSE = 0.05, 0.02, 5.0  # of step times: sd, and rare long steps
_SHOWN = 1.0, 1000.0  # regrets in the figure, %
_BEDS: tuple[tuple[Noise, str, Optimizer, float, float, float, float], ...] = (
    # noise, spectrum, optimizer, overhead, target, level of noise: greedy rate, another one
    ("proportional", "1/i", "sgd", 10, 0.1, 4, 4),
    ("proportional", "1/i", "sgd", 1000, 0.1, 40, 320),
    ("proportional", "1/i", "sgd", 10_000, 0.1, 40, 320),
    ("proportional", "1/i", "momentum", 1000, 0.1, 40, 640),
    ("proportional", "1/i", "preconditioned", 1000, 0.03, 1000, 4000),
    ("proportional", "flat", "sgd", 1000, 0.03, 1e5, 8e5),  # preconditioned it is the same
    ("proportional", "flat", "momentum", 1000, 0.03, 1e5, 1.6e6),  # and so it is with any noise
    ("proportional", "two-scale", "sgd", 1000, 0.03, 100, 800),
    ("proportional", "two-scale", "momentum", 1000, 0.03, 300, 2400),
    ("proportional", "two-scale", "preconditioned", 1000, 0.02, 4000, 16_000),
    ("isotropic", "1/i", "sgd", 10, 0.1, 0.04, 0.04),
    ("isotropic", "1/i", "sgd", 1000, 0.1, 0.4, 3.2),
    ("isotropic", "1/i", "sgd", 10_000, 0.1, 0.4, 3.2),
    ("isotropic", "1/i", "momentum", 1000, 0.1, 0.4, 6.4),
    ("isotropic", "1/i", "preconditioned", 1000, 0.001, 0.1, 0.4),
    ("isotropic", "two-scale", "sgd", 1000, 0.03, 10, 80),
    ("isotropic", "two-scale", "momentum", 1000, 0.03, 10, 80),
    ("isotropic", "two-scale", "preconditioned", 1000, 0.003, 1, 4),
)


def beds(rate: Rate, noise: Noise) -> list[Bed]:
    """Each spectrum and optimizer at an overhead of 1,000 samples, the first also at others.

    Noise and target make a training of a hundred to a few hundred steps at the best fixed batch;
    preconditioned ones with isotropic noise have 20 to 100.
    """
    return [
        Bed(
            spectrum, optimizer, rate, overhead, target, greedy if rate == "greedy" else other, kind
        )
        for kind, spectrum, optimizer, overhead, target, greedy, other in _BEDS
        if kind == noise
    ]


@dataclass(frozen=True)
class Candidate:
    """A policy, and its batch size as a formula, for a simulation without measurement."""

    policy: Policy
    batch_size: Rule

    @property
    def max_change(self) -> float:
        """Largest factor of one change; that of SimiGrad too."""
        needs = needs_of(self.policy)
        return (needs.max_change or MAX_CHANGE) if needs.statistics else math.inf


@dataclass(frozen=True)
class Arm:
    """Candidates, of which the best in hindsight is run."""

    name: str
    candidates: Callable[[float, int], list[Candidate]]  # of overhead and first batch size
    is_timed: bool = False  # whether the policy is given times of steps
    follows_decay: bool = False  # whether it needs a rate that decays


def _fixed(size: int) -> Candidate:
    return Candidate(Fixed(size), lambda at: np.full_like(at.samples, size))


def _doubling(start: int, every: int) -> Candidate:
    schedule = Schedule(f"{start}, x2 every {every} samples up to {_MAX_GROWTH * start}")

    def batch_size(at: Moment) -> Array:
        return start * np.minimum(2.0 ** np.floor(np.minimum(at.samples / every, 60)), _MAX_GROWTH)

    return Candidate(schedule, batch_size)


def _similarity(target: float) -> Candidate:
    multiple = 2 * target / (1 - target)
    return Candidate(SimiGrad(target), lambda at: multiple * at.noise_scale)


def _multiple(multiple: float) -> Candidate:
    return Candidate(NoiseScale(multiple), lambda at: multiple * at.noise_scale)


def _seesaw(start: int) -> Candidate:
    return Candidate(Seesaw(), lambda at: start / at.decay)


def _late_switch(start: int, share: float) -> Candidate:
    policy = LateSwitch(share, NoiseScale())
    return Candidate(policy, lambda at: np.where(at.decay <= share, at.noise_scale, start))


def _goodput(overhead: float, given: float | None) -> Candidate:
    return Candidate(Goodput(given), lambda at: np.sqrt(overhead * at.noise_scale))


FIXED = Arm("Fixed, best in hindsight", lambda *_: [_fixed(2**n) for n in range(22, 5, -1)])
ARMS = (
    Arm(
        "doubling, best in hindsight",
        lambda _, start: [_doubling(start, 4**n * start) for n in range(5, -1, -1)],
    ),
    Arm("SimiGrad(0.2)", lambda *_: [_similarity(0.2)]),
    Arm(
        "SimiGrad, best in hindsight",
        lambda *_: [_similarity(phi) for phi in (0.4, 0.2, 0.1, 0.05, 0.02, 0.01)],
    ),
    Arm("NoiseScale(1)", lambda *_: [_multiple(1.0)]),
    Arm(
        "NoiseScale, best in hindsight",
        lambda *_: [_multiple(m) for m in (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02)],
    ),
    Arm("Seesaw", lambda _, start: [_seesaw(start)], follows_decay=True),
    Arm(
        "LateSwitch(0.3, NoiseScale)",
        lambda _, start: [_late_switch(start, 0.3)],
        follows_decay=True,
    ),
    Arm("Goodput, overhead given", lambda overhead, _: [_goodput(overhead, overhead)]),
    Arm("Goodput", lambda overhead, _: [_goodput(overhead, None)], is_timed=True),
)


@dataclass(frozen=True)
class Regret:
    """One policy on one bed: times, samples and steps over those of the best schedule, less 1.

    One of each per seed; infinite where the target was not reached.
    """

    arm: str
    bed: Bed
    policy: Policy  # the candidate that was run
    times: list[float]
    samples: list[float]
    steps: list[float]
    best: Outcome

    def row(self) -> Row:
        """The row of the table."""
        return {
            "rate": self.bed.rate,
            "noise": self.bed.noise_shape,
            "bed": str(self.bed),
            "policy": self.arm,
            "time": _percent(median(self.times)),
            "samples": _percent(median(self.samples)),
            "steps": _percent(median(self.steps)),
            "chosen": _setting(self.policy),
            "best steps": f"{self.best.steps:.0f}",
        }


def run(
    rates: Sequence[Rate],
    noises: Sequence[Noise],
    seed: int = 0,
    seeds: int = _SEEDS,
    number: int | None = None,
) -> Iterator[Regret]:
    """Every policy on every bed; `number` limits the beds of each rate and noise."""
    for rate, noise in product(rates, noises):
        for bed in beds(rate, noise)[:number]:
            yield from compare(bed, seed, seeds)


def compare(bed: Bed, seed: int = 0, seeds: int = _SEEDS) -> list[Regret]:
    """Every policy on one bed, each at the learning rate that suits it best.

    All but `Fixed` start at an eighth of the best fixed batch size.
    """
    fixed, outcome = _best_candidate(bed, FIXED, BASE_BATCH, None)
    assert isinstance(fixed.policy, Fixed)
    start = max(_MICRO_BATCHES, fixed.policy.batch_size // _FIRST_SHARE)
    arms = [(FIXED, fixed, outcome)]
    others = [arm for arm in ARMS if bed.rate == "decaying" or not arm.follows_decay]
    arms += [(arm, *_best_candidate(bed, arm, start, outcome)) for arm in others]
    _, first, outcome = min(arms, key=lambda one: one[2].time)
    best = optimal_schedule(bed, _at_knots(bed, first, start, outcome), outcome, seed)
    regrets = []
    for arm, candidate, outcome in arms:
        runs = [outcome]  # of a policy that measures nothing
        if needs_of(candidate.policy).statistics:
            rates = _tuned(bed, arm, candidate, start, outcome, seed + _TUNING)
            runs = [
                simulate(bed, arm, candidate, start, rates, s) for s in range(seed, seed + seeds)
            ]
        regrets.append(
            Regret(
                arm.name,
                bed,
                candidate.policy,
                [one.time / best.time - 1 for one in runs],
                [one.samples / best.samples - 1 for one in runs],
                [one.steps / best.steps - 1 for one in runs],
                best,
            )
        )
    return regrets


def _tuned(
    bed: Bed, arm: Arm, candidate: Candidate, start: int, outcome: Outcome, seed: int
) -> Outcome:
    """The rate that suits a measuring policy best, on a seed that is not shown.

    The best rate without measurement error may be too near the largest stable one.
    """
    best = outcome = replace(outcome, time=math.inf)
    for peak, length in _TRIED if bed.rate != "greedy" else ():
        rates = replace(outcome, peak=peak * outcome.peak, length=length * outcome.length)
        run = simulate(bed, arm, candidate, start, rates, seed, limit=best.time)
        best = run if run.time < best.time else best
    return best


def simulate(
    bed: Bed,
    arm: Arm,
    candidate: Candidate,
    start: int,
    rates: Outcome,
    seed: int,
    *,
    limit: float = math.inf,
) -> Outcome:
    """A training whose controller sees measured statistics, as a real one does.

    It starts at the batch size `start`, has the peak rate and the length of the decay of `rates`,
    and is given up at the time `limit`. The seed is of measurements, losses and times.
    """
    generator = np.random.default_rng(seed)
    policy = candidate.policy
    controller = Controller(policy, start, min_batch=_MICRO_BATCHES, max_batch=_MAX_BATCH)
    moments, samples, times, trend = bed.start(1), 0, StepTimes(), LossTrend()
    peak, length, loss = np.array([rates.peak]), np.array([rates.length]), 1.0
    decay = np.ones(1)
    for steps in range(_MAX_STEPS):
        batch_size = controller.decision.batch_size
        size = np.array([float(batch_size)])
        statistics = bed.measure(moments, batch_size, _MICRO_BATCHES, generator)
        if bed.rate == "greedy":
            rate = bed.greedy_rate(moments, size)
        else:
            rate = bed.scheduled_rate(peak, decay, size)
        bed.step(moments, rate, size)
        samples += batch_size
        decay = bed.decay(np.array([float(samples)]), length)
        before, loss = loss, float(bed.loss(moments)[0])
        if loss <= bed.target:
            part = float(last_part(np.array(before), np.array(loss), bed.target))
            total = samples - (1 - part) * batch_size
            return replace(
                rates, time=total + bed.overhead * (steps + part), samples=total, steps=steps + part
            )
        if not loss < _DIVERGED or samples + bed.overhead * steps > limit:
            break
        if arm.is_timed:
            times.add(batch_size, _step_seconds(bed, batch_size, generator))
        trend.add(batch_size, before + generator.standard_normal() / math.sqrt(batch_size))
        now = TrainingState(
            target_batch_size=0,
            batch_size=batch_size,
            samples=samples,
            steps=steps + 1,
            lr_decay=float(decay[0]),
            step_times=times.sizes if arm.is_timed else (),
            loss_trend=trend.trend,
        )
        controller.next(statistics, now)
    return replace(rates, time=math.inf, samples=math.inf, steps=math.inf)


def _step_seconds(bed: Bed, batch_size: int, generator: np.random.Generator) -> float:
    """Time of a step, with scatter and now and then a pause."""
    pause = _PAUSE if generator.random() < _PAUSES else 1.0
    scatter = math.exp(_TIME_SCATTER * generator.standard_normal())
    return (bed.overhead + batch_size) * scatter * pause


def _best_candidate(
    bed: Bed, arm: Arm, start: int, near: Outcome | None
) -> tuple[Candidate, Outcome]:
    """The candidate with the least time, each at its best rate.

    Candidates are in order, and time has one minimum along it: the search ends two beyond it.
    """
    best: tuple[Candidate, Outcome] | None = None
    worse = 0
    for candidate in arm.candidates(bed.overhead, start):
        limit = math.inf if best is None else best[1].time
        outcome = with_best_rate(
            bed,
            candidate.batch_size,
            near,
            limit=limit,
            max_change=candidate.max_change,
            start=start,
        )
        if best is None or outcome.time < best[1].time:
            best, worse = (candidate, outcome), 0
            near = outcome if math.isfinite(outcome.time) else near
        elif (worse := worse + 1) == _WORSE:
            break
    assert best is not None
    return best


def _at_knots(bed: Bed, candidate: Candidate, start: int, outcome: Outcome) -> Array:
    """ln B of a candidate at the knots of a schedule, where its training passes them."""
    log_losses: list[float] = []
    log_sizes: list[float] = []

    def rule(at: Moment) -> Array:
        size = np.maximum(candidate.batch_size(at), 1.0)
        log_losses.append(-float(at.log_loss[0]))
        log_sizes.append(math.log(float(size[0])))
        return size

    log_rates = np.log([[outcome.peak, outcome.length]])
    bed.run(rule, log_rates, max_change=candidate.max_change, start=start)
    return np.interp(-knots(bed), np.maximum.accumulate(log_losses), log_sizes)


def _by_kind(regrets: Sequence[Regret]) -> Iterator[tuple[Rate, Noise, dict[str, list[Regret]]]]:
    """The regrets of each rate and noise, by policy."""
    for rate, noise in dict.fromkeys((one.bed.rate, one.bed.noise_shape) for one in regrets):
        arms: dict[str, list[Regret]] = {}
        for one in regrets:
            if (one.bed.rate, one.bed.noise_shape) == (rate, noise):
                arms.setdefault(one.arm, []).append(one)
        yield rate, noise, arms


def summary(regrets: Sequence[Regret]) -> Iterator[Row]:
    """One row for each rate, noise and policy."""
    for rate, noise, arms in _by_kind(regrets):
        for arm, chosen in arms.items():
            times = [median(one.times) for one in chosen]
            yield {
                "rate": rate,
                "noise": noise,
                "policy": arm,
                "median regret": _percent(median(times)),
                "largest": _percent(max(times)),
                "within 10 %": f"{sum(t <= 0.1 for t in times)} of {len(times)}",
                "within 30 %": f"{sum(t <= 0.3 for t in times)} of {len(times)}",
                "samples": _percent(median(median(one.samples) for one in chosen)),
                "steps": _percent(median(median(one.steps) for one in chosen)),
            }


def figure(regrets: Sequence[Regret]) -> list[Panel]:
    """A panel for each rate and noise, with a point for each policy and bed, and their medians."""
    arms = list(dict.fromkeys(one.arm for one in regrets))
    panels = []
    for rate, noise, chosen in _by_kind(regrets):
        shown = {
            arms.index(arm): [
                min(max(100 * median(one.times), _SHOWN[0]), _SHOWN[1]) for one in found
            ]
            for arm, found in chosen.items()
        }
        points = [(x, place) for place, xs in shown.items() for x in xs]
        medians = [(median(xs), place) for place, xs in shown.items()]
        named = {"a bed": points, "median of the beds": medians}
        series = [
            Series(name, [x for x, _ in found], [y for _, y in found], kind="points", style=style)
            for style, (name, found) in enumerate(named.items())
        ]
        title = f"{rate} rate, {noise} noise: more time than the best schedule, %"
        panels.append(
            Panel(
                title,
                f"{_SHOWN[0]:g} or less, {_SHOWN[1]:,.0f} or more",
                series,
                x_log=10,
                y_names=arms,
                marks=[Mark("", x=10)],
                size=(560, 60 + 18 * len(arms)),
            )
        )
    return panels


def _percent(regret: float) -> str:
    return f"{100 * regret:+.0f} %" if math.isfinite(regret) else "failed"


def _setting(policy: Policy) -> str:
    """The first argument of a policy: its size, target, multiple or text."""
    value = next(iter(vars(policy).values()), None)
    return "" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of all beds, and one of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=RATES)
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=list(NOISES))
    parser.add_argument("--beds", type=int, help="beds of each rate and noise [all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=_SEEDS, help="trainings of each policy")
    parser.add_argument("--figure", type=Path, help="SVG of all regrets")
    parser.add_argument("--tiny", action="store_true", help="one bed, one training")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.rates, given.beds, given.seeds = ("greedy",), 1, 1
    regrets = list(run(given.rates, given.noises, given.seed, given.seeds, given.beds))
    title = f"over the best schedule; median of {given.seeds} seeds"
    show(title, (one.row() for one in regrets))
    show(f"{title}, and over beds", summary(regrets))
    if given.figure is not None:
        drawn = svg(figure(regrets), key=True, standalone=True)
        write_atomically(given.figure, drawn.encode())


if __name__ == "__main__":
    main()
