"""Table and figure of the shares of settings that reach the target."""

from math import comb

from bigbatch.log.curves import COLORS, add_grid
from matplotlib.figure import Figure

from studies.results.any_start import BATCHES, POLICIES, RATES, WARMUPS, arm_of
from studies.results.markdown import markdown_table
from studies.results.run_log import LoggedRun, RunLog

_EASIER = (1, 3)  # points below the target
_SHOWN = 10  # points below the target that the figure shows
_FIRST = next(iter(POLICIES))


def successes(
    log: RunLog, target: float, policy: str, warmup: str
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


def tables(log: RunLog, target: float) -> str:
    """Shares with and without warm-up, and the trainings in which one of two policies succeeds."""
    rows = []
    for policy in POLICIES:
        row = {"policy": policy}
        for warmup in WARMUPS:
            own, first = (successes(log, target, one, warmup) for one in (policy, _FIRST))
            wins = sum(own[key] and not first[key] for key in own)
            losses = sum(first[key] and not own[key] for key in own)
            row[f"{warmup}: reached"] = f"{sum(own.values())} of {len(own)}"
            against = f"+{wins} -{losses}, p = {sign_test(wins, losses):.2g}"
            row[f"{warmup}: against fixed"] = "" if policy == _FIRST else against
        rows.append(row)
    easier = [_easier_cells(log, target, policy) for policy in POLICIES]
    return "\n\n".join(
        [
            f"Target: {log.score} {target:.2f}.",
            markdown_table(rows),
            "Not in the rule, looked at afterwards: easier targets, with and without warm-up.",
            markdown_table(easier),
        ]
    )


def _easier_cells(log: RunLog, target: float, policy: str) -> dict[str, str]:
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


def figure(log: RunLog, target: float) -> Figure:
    """Mean last score against the rate: a panel for each batch and warm-up, a line for a policy."""
    drawn = Figure(figsize=(10, 5.4), layout="constrained")
    panels = drawn.subplots(len(WARMUPS), len(BATCHES), sharex=True, sharey=True)
    for axes_row, warmup in zip(panels, WARMUPS, strict=True):
        for axes, batch in zip(axes_row, BATCHES, strict=True):
            for policy, color in zip(POLICIES, ("#777777", *COLORS), strict=False):
                runs = log.fresh(arm_of(policy, batch, warmup))
                means = [_mean_score(log, runs, rate) for rate in RATES]
                axes.plot(RATES, means, "o-", color=color, markersize=3, label=policy)
            axes.axhline(target, color="#555555", linestyle="--", linewidth=1)
            axes.set_xscale("log")
            axes.set_title(f"first batch {batch}, {warmup}", fontsize=9, loc="left")
            add_grid(axes)
    panels[0][0].set_ylim(target - _SHOWN, target + 1.5)
    panels[0][0].set_ylabel(f"{log.score}\n(lower ones are not shown)")
    panels[-1][0].set_xlabel("learning rate of a batch of 64")
    drawn.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return drawn


def _mean_score(log: RunLog, runs: list[LoggedRun], rate: float) -> float:
    scores = [run.score(log.score) or 0.0 for run in runs if run.lr == rate]
    return sum(scores) / len(scores)
