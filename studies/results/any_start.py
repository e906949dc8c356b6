"""Does an adaptive batch need no search, no warm-up, and no good first rate or batch?

docs/results.md has the hypotheses and the rule, which were written before the runs.
"""

from math import comb
from statistics import fmean

from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.series_style import NEUTRAL
from studies.markdown_tables import Row, markdown_table
from studies.results.batch_comparisons import MEASURED, MLP, UNMEASURED
from studies.results.comparison import Arms, Comparison
from studies.results.comparison_log import ComparisonLog

BATCHES = (32, 128, 512)
RATES = (0.005, 0.011, 0.023, 0.05, 0.11, 0.23, 0.5)
WARMUPS = {"with warm-up": "warm-up 0.2 epochs; cosine", "without": "cosine"}
POLICIES = {
    "fixed": {"policy": "fixed", **UNMEASURED},
    "SimiGrad .2": {"policy": "simigrad", "target": 0.2, **MEASURED},
    "SimiGrad .4": {"policy": "simigrad", "target": 0.4, **MEASURED},
    "noise scale": {"policy": "noise-scale", **MEASURED, "smoothing": "16 steps"},
}
_EASIER = (1, 3)  # points below the target
_SHOWN = 10  # points below the target that the figure shows
_FIRST = next(iter(POLICIES))


def arm_of(policy: str, batch: int, warmup: str) -> str:
    """Name of an arm."""
    return f"{policy}; {batch}; {warmup}"


def _arms(_: object) -> Arms:
    return {
        arm_of(policy, batch, warmup): {**changes, "batch_size": batch, "lr_schedule": schedule}
        for policy, changes in POLICIES.items()
        for batch in BATCHES
        for warmup, schedule in WARMUPS.items()
    }


COMPARISON = Comparison(
    name="any-start",
    recipe="fashion-mnist",
    settings={**MLP, "held_out": 0, "evaluate_every": "20K samples"},
    arms=_arms,
    rates=RATES,
    seeds=2,
)


def successes(
    log: ComparisonLog, target: float, policy: str, warmup: str
) -> dict[tuple[int, float, int], bool]:
    """Whether each training reaches the target at its end, by batch, rate and seed."""
    return {
        (batch, run.lr, run.seed): (run.score(log.score) or 0.0) >= target
        for batch in BATCHES
        for run in log.fresh(arm_of(policy, batch, warmup))
    }


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of so many wins and losses where both are equally likely.

    Example:
        >>> sign_test(5, 0), sign_test(3, 3)
        (0.0625, 1.0)
    """
    trials = wins + losses
    one_sided = sum(comb(trials, n) for n in range(min(wins, losses) + 1)) / 2**trials
    return min(1.0, 2 * float(one_sided))


def tables(log: ComparisonLog, target: float) -> str:
    """Shares with and without warm-up, and the trainings in which one of two policies succeeds."""
    return "\n\n".join(
        [
            f"Target: {log.score} {target:.2f}.",
            markdown_table([_cells(log, target, policy) for policy in POLICIES]),
            "Not in the rule, looked at afterwards: easier targets, with and without warm-up.",
            markdown_table([_easier_cells(log, target, policy) for policy in POLICIES]),
        ]
    )


def _cells(log: ComparisonLog, target: float, policy: str) -> Row:
    row = {"policy": policy}
    for warmup in WARMUPS:
        own, first = (successes(log, target, one, warmup) for one in (policy, _FIRST))
        wins = sum(own[key] and not first[key] for key in own)
        losses = sum(first[key] and not own[key] for key in own)
        row[f"{warmup}: reached"] = f"{sum(own.values())} of {len(own)}"
        against = f"+{wins} -{losses}, p = {sign_test(wins, losses):.2g}"
        row[f"{warmup}: against fixed"] = "" if policy == _FIRST else against
    return row


def _easier_cells(log: ComparisonLog, target: float, policy: str) -> Row:
    """Shares of an easier target by first batch."""
    cells = {"policy": policy}
    for points in _EASIER:
        for batch in BATCHES:
            found = [
                reached
                for warmup in WARMUPS
                for (size, _, _), reached in successes(log, target - points, policy, warmup).items()
                if size == batch
            ]
            cells[f"{target - points:.2f}, batch {batch}"] = f"{sum(found)} of {len(found)}"
    return cells


def figure(log: ComparisonLog, target: float) -> list[Panel]:
    """Mean last score against the rate: a panel for each batch and warm-up, a line for a policy."""
    return [
        Panel(
            f"first batch {batch}, {warmup}",
            "learning rate of a batch of 64",
            [
                Series(
                    policy,
                    RATES,
                    [_mean_score(log, arm_of(policy, batch, warmup), rate) for rate in RATES],
                    markers=True,
                    style=style,
                )
                for style, policy in enumerate(POLICIES, start=NEUTRAL)
            ],
            y_label=log.score,
            x_log=10,
            y_range=(target - _SHOWN, target + 1.5),
            marks=[Mark("target", y=target)],
        )
        for batch in BATCHES
        for warmup in WARMUPS
    ]


def _mean_score(log: ComparisonLog, arm: str, rate: float) -> float:
    return fmean(run.score(log.score) or 0.0 for run in log.fresh(arm) if run.lr == rate)
