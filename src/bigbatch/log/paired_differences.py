"""Differences between the arms of a study or a sweep, paired by seed, with their t interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from bigbatch.errors import SettingError
from bigbatch.log.history import History, Table, group_seeds, range_text, score_unit
from bigbatch.statistics.confidence import student_t

SeedScores = Mapping[int, float | None]  # by seed; None for a run without a valid score

LEVEL = 0.95
_MOST_NAMES = 6  # in a list of arms
_ROUNDING = 1e-12  # of the largest score; differences that spread less are equal


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean difference between the scores of two arms, over the seeds that both have.

        d_s = score_s - reference_s,   mean(d) -+ t sd(d) / sqrt(n)

    with the t of 95 % and n - 1 degrees of freedom. The interval holds for differences that are
    about normal. A pair that lacks a score is counted and not averaged.

    Args:
        by_seed: d_s of the n pairs with both scores.
        pairs: number of common seeds.
        scale: largest absolute score of these pairs.
    Source:
        Student 1908, the paired t interval.
    """

    by_seed: Mapping[int, float]
    pairs: int
    scale: float

    @property
    def missing(self) -> int:
        """Number of pairs that lack a score."""
        return self.pairs - len(self.by_seed)

    @property
    def center(self) -> float | None:
        """The mean difference; None without a pair."""
        return mean(self.by_seed.values()) if self.by_seed else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """(low, high); None with fewer than two pairs, or if all differences are equal."""
        count, center = len(self.by_seed), self.center
        if center is None or count < 2:
            return None
        values = self.by_seed.values()
        if max(values) - min(values) <= _ROUNDING * self.scale:
            return None
        deviation = stdev(values)
        half_width = student_t(LEVEL, count - 1) * deviation / math.sqrt(count)
        return center - half_width, center + half_width

    @property
    def result(self) -> str:
        """Where the interval is, in words; the reason where there is none."""
        if self.interval is not None:
            low, high = self.interval
            return "above" if low > 0 else "below" if high < 0 else "not distinguished"
        if not self.pairs:
            return "no common seed"
        if not self.by_seed:
            return "no pair has both scores"
        reason = "one pair" if len(self.by_seed) == 1 else "equal in every pair"
        return f"{reason}: no interval"

    def cells(self) -> tuple[str, ...]:
        """Mean, interval, pairs and result, as text."""
        digits = 2 if self.scale >= 10 else 4
        low_high = self.interval and ", ".join(f"{end:+,.{digits}f}" for end in self.interval)
        lack = f" ({self.missing} of {self.pairs} pairs lack a score)" * bool(self.missing)
        return (
            "none" if self.center is None else f"{self.center:+,.{digits}f}",
            f"[{low_high}]" if low_high else "none",
            f"{len(self.by_seed)}{lack}",
            self.result,
        )


def paired_difference(scores: SeedScores, reference: SeedScores) -> PairedDifference:
    """The difference of an arm's scores from those of a reference.

    Example:
        >>> difference = paired_difference({0: 3.0, 1: 5.0, 2: 7.0}, {0: 2.0, 1: 3.0, 2: 4.0})
        >>> difference.center, [round(end, 3) for end in difference.interval]
        (2.0, [-0.484, 4.484])
    """
    seeds = [seed for seed in scores if seed in reference]
    by_seed: dict[int, float] = {}
    scale = 0.0
    for seed in seeds:
        score, other = scores[seed], reference[seed]
        if score is not None and other is not None and math.isfinite(score - other):
            by_seed[seed] = score - other
            scale = max(scale, abs(score), abs(other))
    return PairedDifference(by_seed=by_seed, pairs=len(seeds), scale=scale)


@dataclass(frozen=True)
class Differences:
    """Differences of every other arm from a reference arm."""

    reference: str  # its name
    score: str
    arms: Mapping[str, PairedDifference]  # by the names of the other arms
    tuned: tuple[str, ...] = ()  # settings whose best value was chosen by these scores

    @property
    def title(self) -> str:
        """The title of the table."""
        title = f"difference from {self.reference}, paired by seed, {100 * LEVEL:.0f} % interval"
        choice = f"; it leaves out the choice of {' and '.join(self.tuned)}"
        return title + choice * bool(self.tuned)

    @property
    def is_tested(self) -> bool:
        """Whether an arm has two pairs or more, which a test needs."""
        return any(len(difference.by_seed) > 1 for difference in self.arms.values())

    @property
    def verdict(self) -> str:
        """The results of all arms in one sentence, as the table has them."""
        label, unit, factor = score_unit(self.score, [one.scale for one in self.arms.values()])
        arms_of: dict[str, list[str]] = {}
        for name, difference in self.arms.items():
            arms_of.setdefault(difference.result, []).append(name)
        parts = []
        for result, names in sorted(arms_of.items()):
            one, verb = self.arms[names[0]], "is" if len(names) == 1 else "are"
            text = f"{listed(names)} {verb} {result} {self.reference}"
            if one.interval is None:
                text = f"{listed(names)}: {result}"
            elif result == "not distinguished":
                text = f"{listed(names)} {verb} {result} from {self.reference}"
            elif len(names) == 1:
                digits = 2 if unit or one.scale >= 10 else 4
                numbers = sorted(abs(factor * x) for x in (*one.interval, one.center or 0))
                low, center, high = (f"{x:,.{digits}f}" for x in numbers)
                amount = f"{center}{' points' * bool(unit)} {result} {self.reference}"
                text = f"{names[0]} is {amount} ({100 * LEVEL:.0f} % interval {low} to {high})"
            parts.append(text)
        pairs = range_text([n for one in self.arms.values() if (n := len(one.by_seed)) > 1])
        return f"{label[:1].upper()}{label[1:]}: {'; '.join(parts)} (paired by seed, {pairs} seeds)"

    def table(self) -> Table:
        """One row per arm: mean difference, interval, number of pairs, result."""
        rows = [(name, *difference.cells()) for name, difference in self.arms.items()]
        return Table(("run", self.score, "interval", "pairs", "result"), rows)


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: a, b and c; of many the first."""
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} others"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def differences_between(
    scores: Mapping[str, SeedScores], score: str, reference: str, tuned: tuple[str, ...] = ()
) -> Differences | None:
    """Differences of all other arms from the reference; None where there is no other."""
    arms = {
        name: paired_difference(of_arm, scores[reference])
        for name, of_arm in scores.items()
        if name != reference
    }
    return Differences(reference, score, arms, tuned) if arms else None


def differences_of(histories: list[History], against: str | None = None) -> Differences | None:
    """Differences of the main score between groups of seeds; None for one group, or no score."""
    groups = group_seeds(histories)
    if len(groups) < 2 or not any(history.score for history in histories):
        return None
    reference = against if against is not None and against in groups else next(iter(groups))
    runs = [*groups[reference], *(run for each in groups.values() for run in each)]
    score = next(filter(None, (run.score for run in runs)), "score")
    scores = {name: _scores_by_seed(runs, score) for name, runs in groups.items()}
    return differences_between(scores, score, reference)


def _scores_by_seed(runs: list[History], score: str) -> SeedScores:
    """The last score of each seed, the mean over runs of one seed.

    It is None if a run of that seed is unfinished, diverged or has no finite score.
    """
    runs_of: dict[int, list[float | None]] = {}
    for run in runs:
        if "seed" in run.settings:
            is_valid = run.finished and not run.divergence
            last = run.last(score) if is_valid else None
            runs_of.setdefault(run.settings["seed"], []).append(last)
    return {
        seed: None if None in scores else mean([one for one in scores if one is not None])
        for seed, scores in runs_of.items()
    }


def require_reference(against: str | None, names: Mapping[str, object]) -> None:
    """Raises SettingError where `against` is given and is none of these names."""
    if against is not None and against not in names:
        raise SettingError(f"--against {against!r} is unknown; choose one of: {', '.join(names)}")
