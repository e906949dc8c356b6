"""What happened in a study, one sentence per arm."""

from statistics import fmean
from typing import NamedTuple

from bigbatch.log.curve_series import chosen_rows
from bigbatch.log.history import History, group_seeds
from bigbatch.log.paired_differences import reference_of
from bigbatch.log.row_schema import Row
from bigbatch.log.seed_summary import SeedSummary

_LAST_SHARE = 0.1  # of the samples; the batch at the end is the mean over it
_EQUAL_BATCH = 1.05  # ratio of batches that counts as no change
_EQUAL = 0.005  # relative difference of steps that counts as none
_EQUAL_SAMPLES = 0.01
_TIMES = 2.0  # ratio of steps from which it is given in place of percent


class ArmSummary(NamedTuple):
    """The sentence on one arm: `name`, then `text`."""

    name: str
    text: str


def summaries_of(histories: list[History], against: str | None = None) -> list[ArmSummary]:
    """A sentence on each arm, the reference first: batch, steps and score, where they are known.

    Scores are those of runs that are finished and did not diverge. A mean is compared with the
    range of the reference's runs where it has two or more. `against` names the reference; it is the
    first group where no group has this name.
    """
    groups = group_seeds(histories)
    if not groups:
        return []
    reference, score = reference_of(groups, against)
    summary = SeedSummary.of(history.settings for history in histories)
    arms = {
        name: _Arm(name, runs, score, summary)
        for name, runs in sorted(groups.items(), key=lambda item: item[0] != reference)
    }
    is_lone = len(arms) == 1
    return [
        ArmSummary(
            name + " (reference)" * (name == reference and not is_lone),
            "; ".join(filter(None, arm.parts(None if name == reference else arms[reference]))),
        )
        for name, arm in arms.items()
    ]


class _Arm:
    def __init__(
        self, name: str, runs: list[History], score: str | None, summary: SeedSummary
    ) -> None:
        self.name = name
        self.runs = runs
        self.started = [run for run in runs if run.rows]
        self.score = score
        self.summary = summary
        valid = [run for run in runs if run.finished and not run.divergence and score]
        scores = [run.last(score) for run in valid if score]
        self.scores = [one for one in scores if one is not None]

    def parts(self, reference: "_Arm | None") -> list[str]:
        """Parts of the sentence, "" for one that does not apply."""
        if not self.started:
            return ["no step yet"]
        return [self._batch(), self._steps(reference), self._score(reference), *self._failures()]

    def _batch(self) -> str:
        chosen = [chosen_rows(run.rows) for run in self.started]
        sizes = [row["batch_size"] for rows in chosen for row in rows]
        low, high = min(sizes), max(sizes)
        if low == high:
            return f"batch stayed at {low:,}"
        first = fmean(rows[0]["batch_size"] for rows in chosen)
        last = fmean(map(_last_batch, chosen))
        between = f"between {low:,} and {high:,} on the way"
        if first / _EQUAL_BATCH <= last <= first * _EQUAL_BATCH:
            return f"batch began at {first:,.0f} and ended at {last:,.0f} ({between})"
        verb = "grew" if last > first else "shrank"
        text = f"batch {verb} from {first:,.0f} to {last:,.0f}"
        inside = min(first, last) / _EQUAL_BATCH <= low and high <= max(first, last) * _EQUAL_BATCH
        return text if inside else f"{text} ({between})"

    def _steps(self, reference: "_Arm | None") -> str:
        steps = fmean(run.steps for run in self.started)
        if not self._finished:
            return f"{steps:,.0f} steps so far"
        if reference is None or not reference._finished:
            return f"{steps:,.0f} steps"
        base = fmean(run.steps for run in reference.runs)
        compared = base and f"{_compared(steps, base, 'steps')} {reference.name}"
        text = compared or f"{steps:,.0f} steps"
        samples, base_samples = self._samples, reference._samples
        if abs(samples / base_samples - 1) > _EQUAL_SAMPLES:
            text += f", {_compared(samples, base_samples, 'samples')} it"
        return text

    def _score(self, reference: "_Arm | None") -> str:
        if not self.scores:
            return f"no final {self.score}" if self.score else "no score yet"
        center = self.summary.center(self.scores)
        number = f"{{:,.{2 if abs(center) >= 10 else 4}f}}".format  # as in the tables
        word = f"{self.summary.center_word} " * (len(self.scores) > 1)
        text = f"{word}{self.score}: {number(center)}"
        others = reference.scores if reference else []
        if reference is None:
            low, high = min(self.scores), max(self.scores)
            over = f" ({number(low)} to {number(high)} over {len(self.scores)} runs)"
            return text + over * (len(self.scores) > 1)
        if len(others) < 2:
            return text + (f" ({reference.name}: {number(others[0])})" if others else "")
        low, high = min(others), max(others)
        runs = f"{len(others)} runs of {reference.name}"
        if low <= center <= high:
            return f"{text}, within the range of the {runs}"
        return f"{text}, {'below' if center < low else 'above'} all {runs}"

    def _failures(self) -> list[str]:
        counts = {
            "diverged": sum(bool(run.divergence) for run in self.runs),
            "unfinished": sum(not run.finished for run in self.runs),
        }
        return [
            f"{count} of {len(self.runs)} {'run' if len(self.runs) == 1 else 'runs'} {word}"
            for word, count in counts.items()
            if count
        ]

    @property
    def _finished(self) -> bool:
        return all(run.finished for run in self.runs)

    @property
    def _samples(self) -> float:
        return fmean(run.rows[-1]["samples"] for run in self.started)


def _last_batch(rows: list[Row]) -> float:
    start = (1 - _LAST_SHARE) * rows[-1]["samples"]
    return fmean(row["batch_size"] for row in rows if row["samples"] >= start)


def _compared(value: float, base: float, unit: str) -> str:
    """How many more or fewer of a unit, up to the name of what they are compared with."""
    change = value / base - 1
    if abs(change) < _EQUAL:
        return f"as many {unit} as"
    if value >= _TIMES * base:
        return f"{value / base:.3g} times the {unit} of"
    return f"{100 * abs(change):.0f} % {'fewer' if change < 0 else 'more'} {unit} than"
