"""Does the estimate track the truth? Similarity, noise scale and batch size in real trainings."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from bigbatch.log.curves import COLORS, add_grid
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.results.estimate_log import (
    BRANCH_STEPS,
    FIXED_WAYS,
    GROUPS,
    POLICY_WAYS,
    Log,
    fixed_arms,
    policy_arms,
    train,
)
from studies.results.markdown import markdown_table
from studies.results.tracked_training import EVERY, Arm
from studies.results.tracking_error import OverSeeds, over_seeds, verdict

__all__ = ["HYPOTHESIS", "RULE", "figure", "table", "train"]

HYPOTHESIS = """\
Written before the run, from the simulation of `bigbatch bench decisions` and two pilot trainings
with another seed.

1. One step is unbiased at every k: signal within 5 %, tr(Sigma) within 2 %, similarity within .03
   of the truth. The scatter of the similarity at a batch of 128 is .18 at k = 2, .16 at 4, .14 at
   8 and .13 at 16; 8 groups of one backward are as good as 8 micro-batches. A fifth of all steps
   measures a signal that is not positive.
2. An average over 16 steps is unbiased within 10 %, has a scatter of .45 in ln B_simple at k = 2
   and of .40 at 16, and is 16 steps late. Exact values in the same average would leave a scatter
   of .30, because the true signal changes by a factor of two within a few steps. The average
   "auto" has a smaller scatter, .35, and is later, 20 steps.
3. The batch against that of the same rule with the truth: bias between -.10 and 0; scatter in ln
   B of .30 with SimiGrad, .40 with NoiseScale over 16 steps and .20 with Goodput, half of that of
   the noise scale; 10 to 25 steps late. k = 16 in place of 4 lowers the scatter by less than a
   fifth.
4. With momentum the branch test finds a critical batch larger than B_simple: a ratio of 2,
   between .5 and 5.
"""

RULE = """\
Seeds are the units; an interval is the 95 % t-interval of the mean over them. A quantity tracks
the truth if all its intervals lie inside their bands, does not if one lies wholly outside, and is
undecided otherwise:

- one step: signal and tr(Sigma) biased by at most 10 %, similarity by at most .05;
- noise scale and batch: mean of ln(estimate / truth) within -.22 and .22, a factor of 1.25; its
  standard deviation within a run at most .41, a factor of 1.5; at most 16 steps late;
- branch test: mean of ln(B_crit / B_simple) within -.69 and .69, a factor of 2, and at most one
  seed of five without a finite B_crit.

k or the way matters where the paired interval of the difference of the scatters excludes 0. Steps
without a positive signal, shifts without a best one and branch tests without a finite estimate
are counted and left out of the means.
"""

_MAX_BIAS, _MAX_SCATTER, _MAX_LAG, _MAX_RATIO = 0.22, 0.41, 16.0, 0.69
_MAX_PART, _MAX_SIMILARITY = 0.10, 0.05  # biases of one step
_FEWEST_BRANCHES = 4  # seeds of five with a finite critical batch


def table(log: Log) -> str:
    """The tables in Markdown, each row with its verdict."""
    parts = {
        "One step": _step_table(log),
        "Averages of signal and noise": _average_table(log),
        "Batch sizes": _batch_table(log),
        "Does k matter?": _paired_table(log),
        "Branch tests": _branch_table(log),
    }
    return "\n".join(f"### {title}\n\n{text}\n" for title, text in parts.items())


def _by_arm(log: Log) -> dict[str, list[Log]]:
    """The runs of each arm, by seed."""
    arms: dict[str, list[Log]] = {}
    for run in log["runs"]:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def _step_table(log: Log) -> str:
    rows = []
    for arm, runs in _by_arm(log).items():
        steps = [run["step"] for run in runs]
        signal, noise, bias, scatter = (
            over_seeds([one[name] for one in steps])
            for name in ("signal", "noise", "similarity_bias", "similarity_scatter")
        )
        checks = [
            (signal, -_MAX_PART, _MAX_PART),
            (noise, -_MAX_PART, _MAX_PART),
            (bias, -_MAX_SIMILARITY, _MAX_SIMILARITY),
        ]
        rows.append(
            {
                "training": arm,
                "signal": signal.text(signed=True),
                "tr(Sigma)": noise.text(signed=True),
                "true similarity": _mean_text(over_seeds([one["similarity"] for one in steps]), 2),
                "similarity": bias.text(3, signed=True),
                "its scatter": scatter.text(),
                "signal <= 0": _failed_share(steps),
                "verdict": verdict(checks),
            }
        )
    errors = [_value(run["truth_error"]) for run in log["runs"]]
    return (
        f"{markdown_table(rows)}\n\n"
        "The exact values have no error for the training set. For a larger population that it is "
        "drawn from, the\nstandard error of the true ln B_simple is "
        f"{median(errors):.2f} (median of the runs)."
    )


def _average_table(log: Log) -> str:
    rows = []
    for arm, runs in _by_arm(log).items():
        for window in runs[0]["averages"]:
            pairs = [run["averages"][window] for run in runs]
            rows.append({"training": arm, "average": window, **_tracking_cells(pairs)})
    return markdown_table(rows)


def _batch_table(log: Log) -> str:
    batches = {
        arm: [run["batch"] for run in runs]
        for arm, runs in _by_arm(log).items()
        if "batch" in runs[0]
    }
    rows = [{"training": arm, **_tracking_cells(pairs)} for arm, pairs in batches.items()]
    for row in rows:
        del row["signal <= 0"]  # every step has a batch size
    return markdown_table(rows)


def _tracking_cells(pairs: Sequence[Log]) -> dict[str, str]:
    """The cells of errors of ln B: of the estimate, and what exact values would leave."""
    estimates = [pair["estimate"] for pair in pairs]
    bias, scatter, lag = _intervals(estimates)
    exact_bias, exact_scatter, exact_lag = _intervals([pair["exact"] for pair in pairs])
    checks = [(bias, -_MAX_BIAS, _MAX_BIAS), (scatter, 0, _MAX_SCATTER), (lag, -_MAX_LAG, _MAX_LAG)]
    return {
        "bias": bias.text(signed=True),
        "scatter": scatter.text(),
        "exact: bias": _mean_text(exact_bias, 2),
        "exact: scatter": _mean_text(exact_scatter, 2),
        "steps late": lag.text(0) + _count_text(lag, len(pairs)),
        "exact: late": _mean_text(exact_lag, 0) + _count_text(exact_lag, len(pairs)),
        "signal <= 0": _failed_share(estimates),
        "verdict": verdict(checks),
    }


def _intervals(errors: Sequence[Log]) -> tuple[OverSeeds, OverSeeds, OverSeeds]:
    bias, scatter, lag = (
        over_seeds([one[name] for one in errors]) for name in ("bias", "scatter", "lag")
    )
    return bias, scatter, lag


def _paired_table(log: Log) -> str:
    """Differences of scatter between two ways to measure, paired over seeds."""
    arms, rows = _by_arm(log), []
    for what, first, second, scatter in _comparisons():
        runs = zip(arms[first.name], arms[second.name], strict=True)
        difference = over_seeds([scatter(other) - scatter(one) for one, other in runs])
        matters = difference.seeds > 1 and difference.low * difference.high > 0
        rows.append(
            {
                "scatter of": what,
                "from": first.name,
                "to": second.name,
                "difference": difference.text(3, signed=True),
                "verdict": "matters" if matters else "undecided",
            }
        )
    return markdown_table(rows)


def _comparisons() -> list[tuple[str, Arm, Arm, Callable[[Log], float]]]:
    """What is compared, its two arms, and the scatter of a run."""
    fixed = fixed_arms()
    least, most = fixed[0], fixed[len(FIXED_WAYS) - 1]
    as_many = fixed[FIXED_WAYS.index(GROUPS)]
    policies = policy_arms()
    half = len(policies) // len(POLICY_WAYS)
    return [
        ("similarity", least, most, _similarity_scatter),
        ("similarity", as_many, fixed[-1], _similarity_scatter),
        ("noise scale over 16 steps", least, most, _average_scatter),
        ("noise scale over 16 steps", as_many, fixed[-1], _average_scatter),
        *(
            ("batch size", one, other, _batch_scatter)
            for one, other in zip(policies[:half], policies[half:], strict=True)
        ),
    ]


def _similarity_scatter(run: Log) -> float:
    return _value(run["step"]["similarity_scatter"])


def _average_scatter(run: Log) -> float:
    return _value(run["averages"]["16 steps"]["estimate"]["scatter"])


def _batch_scatter(run: Log) -> float:
    return _value(run["batch"]["estimate"]["scatter"])


def _branch_table(log: Log) -> str:
    rows = []
    for step in BRANCH_STEPS:
        tests = [test for test in log["branches"] if test["step"] == step]
        if not tests:
            continue
        critical = [_value(test["critical_batch"]) for test in tests]
        ratios = over_seeds([_log_ratio(test) for test in tests])
        enough = ratios.seeds >= min(_FEWEST_BRANCHES, len(tests))
        inside = verdict([(ratios, -_MAX_RATIO, _MAX_RATIO)])
        rows.append(
            {
                "steps": str(step),
                "B_simple": _range_text([_value(test["true_scale"]) for test in tests]),
                "B_crit": _range_text(critical),
                "ln ratio": ratios.text(signed=True) + _count_text(ratios, len(tests)),
                "B_simple below, in, above the interval": _positions(tests),
                "no upper end": str(sum(test["high"] == "inf" for test in tests)),
                "verdict": inside if enough or inside == "does not" else "undecided",
            }
        )
    return markdown_table(rows)


def _log_ratio(test: Log) -> float:
    """ln(B_crit / B_simple); nan unless both are positive and finite."""
    critical, scale = _value(test["critical_batch"]), _value(test["true_scale"])
    if not (0 < critical < math.inf and 0 < scale < math.inf):
        return math.nan
    return math.log(critical / scale)


def _positions(tests: Sequence[Log]) -> str:
    """How often B_simple is below, inside and above the interval of B_crit."""
    scales = [(_value(test["true_scale"]), test) for test in tests]
    below = sum(scale < _value(test["low"]) for scale, test in scales)
    above = sum(scale > _value(test["high"]) for scale, test in scales)
    return f"{below}, {len(tests) - below - above}, {above}"


# text


def _value(number: Any) -> float:
    """A number of a log: nan for None."""
    return math.nan if number is None else float(number)


def _mean_text(interval: OverSeeds, digits: int) -> str:
    return f"{interval.mean:.{digits}f}" if interval.seeds else "none"


def _count_text(interval: OverSeeds, seeds: int) -> str:
    return "" if interval.seeds == seeds else f", {interval.seeds} of {seeds} seeds"


def _failed_share(errors: Sequence[Log]) -> str:
    failures, compared = (sum(one[name] for one in errors) for name in ("failures", "compared"))
    return f"{failures} of {compared:,}"


def _range_text(values: Sequence[float]) -> str:
    """median [least, most] of those that are known."""
    known = [value for value in values if not math.isnan(value)]
    return f"{median(known):.0f} [{min(known):.0f}, {max(known):.0f}]" if known else "none"


# figure


def figure(log: Log) -> Figure:
    """Noise scale and batch sizes of the first seed; scatter by k; branch tests of all seeds."""
    drawing = Figure(figsize=(11, 7.6), layout="constrained")
    panels = drawing.subplots(2, 2).flat
    titles = (
        f"noise scale, fixed batch, k = {POLICY_WAYS[0]}, first seed",
        f"batch size, k = {POLICY_WAYS[0]}, first seed",
        "scatter by k, mean and 95 % interval over seeds",
        "critical batch of branch tests, with 90 % intervals",
    )
    draw = (_draw_scales, _draw_batches, _draw_scatter, _draw_branches)
    for axes, title, draw_panel in zip(panels, titles, draw, strict=True):
        draw_panel(axes, log)
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        add_grid(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7.5, frameon=False)
    return drawing


def _draw_scales(axes: Axes, log: Log) -> None:
    series = log["example"][fixed_arms()[FIXED_WAYS.index(POLICY_WAYS[0])].name]
    styles = (
        ("exact", f"exact, every {EVERY} steps", "#aaaaaa", 0.7),
        ("truth", "exact, over 16 steps before and after", "#000000", 1.5),
        ("average", "estimate, over the last 16 steps", COLORS[1], 1.2),
    )
    for name, label, color, width in styles:
        values = [_finite(number) for number in series[name]]
        axes.plot(values, color=color, linewidth=width, label=label)
    _label(axes, "step", "noise scale, samples")


def _draw_batches(axes: Axes, log: Log) -> None:
    for color, arm in zip(COLORS, policy_arms(), strict=False):
        if (series := log["example"].get(arm.name)) is not None:
            policy = type(arm.policy).__name__
            axes.plot(series["batch"], color=color, linewidth=1.1, label=policy)
            axes.plot(series["truth"], color=color, linewidth=1.1, linestyle=":")
    axes.plot([], color="#555555", linestyle=":", label="the same rule with the truth")
    _label(axes, "step", "batch size, samples")


def _draw_scatter(axes: Axes, log: Log) -> None:
    arms = _by_arm(log)
    ways = fixed_arms()
    labels = [
        f"{arm.micro_batches} groups" if arm.by_groups else f"{arm.micro_batches}" for arm in ways
    ]
    measures = (
        ("similarity of one step", _similarity_scatter),
        ("ln B_simple over 16 steps", _average_scatter),
    )
    for color, (label, scatter) in zip(COLORS, measures, strict=False):
        intervals = [over_seeds([scatter(run) for run in arms[arm.name]]) for arm in ways]
        means = [one.mean for one in intervals]
        bars = [one.high - one.mean if math.isfinite(one.high) else 0 for one in intervals]
        axes.errorbar(
            labels,
            means,
            bars,
            color=color,
            marker="o",
            markersize=4,
            linewidth=0,
            elinewidth=1,
            capsize=2,
            label=label,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches", fontsize=8)
    axes.set_ylabel("standard deviation within a run", fontsize=8)


def _draw_branches(axes: Axes, log: Log) -> None:
    for number, test in enumerate(log["branches"]):
        low, critical, high = (_value(test[name]) for name in ("low", "critical_batch", "high"))
        axes.plot([number, number], [max(low, 1), min(high, 1e5)], color=COLORS[0], linewidth=1)
        axes.plot(number, _finite(critical) or math.nan, color=COLORS[0], marker="o", markersize=4)
        axes.plot(number, _value(test["true_scale"]), color=COLORS[1], marker="_", markersize=9)
    axes.plot([], color=COLORS[0], marker="o", markersize=4, label="B_crit")
    axes.plot([], color=COLORS[1], marker="_", markersize=9, linewidth=0, label="exact B_simple")
    axes.set_xticks(range(len(log["branches"])), [str(test["step"]) for test in log["branches"]])
    _label(axes, "steps before the test, seed by seed", "samples")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)


def _finite(number: Any) -> float:
    """A number to draw: nan, a gap, where it is not finite."""
    value = _value(number)
    return value if math.isfinite(value) else math.nan
