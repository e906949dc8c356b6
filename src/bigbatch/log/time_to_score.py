"""Steps, samples and seconds until the main score of a run reaches a target."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bigbatch.log.history import History, Table, group_seeds, unfinished_text
from bigbatch.setting_types import Number, checked

_NEVER = "never"


@dataclass(frozen=True)
class TimeToScore:
    """What a run had consumed at an evaluation.

    The seconds are the `elapsed_seconds` of the evaluated step: since the loop was built, over all
    resumptions. They include earlier evaluations and checkpoints, and not this evaluation.
    """

    steps: int  # updates of the weights, without skipped steps
    samples: int  # those of skipped steps included
    seconds: float


@checked
def time_to_score(
    history: History, target: Number, *, higher_is_better: bool
) -> TimeToScore | None:
    """What a run had consumed at its first evaluation whose main score reaches the target.

    The time is known to one interval of `evaluate_every`. A later fall of the score is no matter.
    None where no evaluation reaches it.

    Raises:
        SettingError: the target is not finite.
    """
    times = evaluations(history)
    better = higher_is_better
    return next((time for time, y in times if reaches(y, target, higher_is_better=better)), None)


def evaluations(history: History) -> Iterator[tuple[TimeToScore, float | None]]:
    """What a run had consumed at each evaluation, with its main score; None if not finite."""
    skipped = 0
    for row in history.rows:
        skipped += row["skipped"]
        if row["metrics"] is not None:
            time = TimeToScore(row["step"] - skipped, row["samples"], row["elapsed_seconds"])
            yield time, row["metrics"].get(history.score)


def reaches(score: float | None, target: float, *, higher_is_better: bool) -> bool:
    """Whether a score is at the target or better; None is not."""
    return score is not None and (score >= target if higher_is_better else score <= target)


@checked
@dataclass(frozen=True)
class ScoreTargets:
    """One target of the main score or more, and the table of the times to reach them.

    Raises:
        SettingError: a target is not finite.
    """

    targets: list[Number]

    def title(self, histories: list[History]) -> str:
        """The title of the table."""
        scores = " or ".join(filter(None, dict.fromkeys(run.score for run in histories)))
        return (
            f"first evaluation with this {scores or 'score'}, median [least, most] over seeds; "
            f"{_NEVER} means not in the log"
        )

    def table(self, histories: list[History]) -> Table:
        """One row per group of seeds and target: runs that reached it, steps, samples, seconds.

        A run that does not reach it counts as infinite in median and most.
        """
        rows = []
        for name, runs in group_seeds(histories).items():
            name += unfinished_text(runs)
            rows += [(name, *_cells(runs, target)) for target in self.targets]
        return Table(("run", "target", "reached", "steps", "samples", "seconds"), rows)


def _cells(runs: list[History], target: float) -> tuple[str, ...]:
    is_higher = runs[0].higher_is_better
    times = [time_to_score(run, target, higher_is_better=is_higher) for run in runs]
    reached = [time for time in times if time is not None]
    never = [math.inf] * (len(times) - len(reached))
    return (
        f"at {'least' if is_higher else 'most'} {target:g}",
        f"{len(reached)} of {len(runs)}",
        _text([*(time.steps for time in reached), *never], 0),
        _text([*(time.samples for time in reached), *never], 0),
        _text([*(time.seconds for time in reached), *never], 1),
    )


def _text(values: Sequence[float], digits: int) -> str:
    """Median, least and most; the median alone where the others are equal."""
    center, least, most = (
        f"{value:,.{digits}f}" if math.isfinite(value) else _NEVER
        for value in (median(values), min(values), max(values))
    )
    return center if least == most else f"{center} [{least}, {most}]"
