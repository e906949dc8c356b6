"""Does the estimate track the truth? Tables and figure of docs/results/estimates.json.

docs/results/estimates.md has the hypothesis and the rule, which were written before the run. What
trained it was studies of commit 3d3c2bb, src/bigbatch/results/estimate_log.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from bigbatch.log.chart import Panel, Series
from bigbatch.log.series_style import NEUTRAL
from bigbatch.statistics.confidence import student_t
from studies.markdown_tables import Row, markdown_table

Log = dict[str, Any]

_LEVEL = 0.95
_BRANCH_STEPS = (50, 125, 200)  # before which branches were tested
_FIXED = ("2 micro-batches", "4 micro-batches", "8 micro-batches", "16 micro-batches", "8 groups")
_POLICIES = ("SimiGrad", "NoiseScale", "Goodput")
_MAX_BIAS, _MAX_SCATTER, _MAX_LAG, _MAX_RATIO = 0.22, 0.41, 16.0, 0.69
_MAX_PART, _MAX_SIMILARITY = 0.10, 0.05  # biases of one step
_FEWEST_BRANCHES = 4  # seeds of five with a finite critical batch


@dataclass(frozen=True)
class OverSeeds:
    """Mean of one number per seed, with its 95 % t-interval.

    Args:
        mean, low, high: nan without a seed; infinite ends with one.
        seeds: seeds that have a number.
    """

    mean: float
    low: float
    high: float
    seeds: int

    def text(self, digits: int = 2, *, signed: bool = False) -> str:
        """mean (low to high)."""
        if not self.seeds:
            return "none"
        sign = "+" if signed else ""
        numbers = (f"{number:{sign}.{digits}f}" for number in (self.mean, self.low, self.high))
        return "{} ({} to {})".format(*numbers)

    def mean_text(self, digits: int) -> str:
        """The mean alone."""
        return f"{self.mean:.{digits}f}" if self.seeds else "none"

    def count_text(self, seeds: int) -> str:
        """How many of so many seeds have a number, if not all have."""
        return "" if self.seeds == seeds else f", {self.seeds} of {seeds} seeds"


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """The interval of the mean over seeds; None and nan are left out."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return OverSeeds(math.nan, math.nan, math.nan, 0)
    half_width = math.inf
    if len(known) > 1:
        half_width = student_t(_LEVEL, len(known) - 1) * stdev(known) / math.sqrt(len(known))
    mean = fmean(known)
    return OverSeeds(mean, mean - half_width, mean + half_width, len(known))


def verdict(checks: Sequence[tuple[OverSeeds, float, float]]) -> str:
    """Whether every interval lies inside its band.

    Args:
        checks: interval, lower and upper end of its band.
    Returns:
        "tracks" if all lie inside, "does not" if one lies outside, else "undecided".
    """
    if any(one.seeds and (one.low > high or one.high < low) for one, low, high in checks):
        return "does not"
    inside = all(one.seeds and low <= one.low and one.high <= high for one, low, high in checks)
    return "tracks" if inside else "undecided"


def tables(log: Log) -> str:
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
                "true similarity": over_seeds([one["similarity"] for one in steps]).mean_text(2),
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
    rows = []
    for arm, runs in _by_arm(log).items():
        if "batch" in runs[0]:
            cells = {"training": arm, **_tracking_cells([run["batch"] for run in runs])}
            del cells["signal <= 0"]  # every step has a batch size
            rows.append(cells)
    return markdown_table(rows)


def _tracking_cells(pairs: Sequence[Log]) -> Row:
    """The cells of errors of ln B: of the estimate, and what exact values would leave."""
    estimates = [pair["estimate"] for pair in pairs]
    bias, scatter, lag = _intervals(estimates)
    exact_bias, exact_scatter, exact_lag = _intervals([pair["exact"] for pair in pairs])
    checks = [(bias, -_MAX_BIAS, _MAX_BIAS), (scatter, 0, _MAX_SCATTER), (lag, -_MAX_LAG, _MAX_LAG)]
    return {
        "bias": bias.text(signed=True),
        "scatter": scatter.text(),
        "exact: bias": exact_bias.mean_text(2),
        "exact: scatter": exact_scatter.mean_text(2),
        "steps late": lag.text(0) + lag.count_text(len(pairs)),
        "exact: late": exact_lag.mean_text(0) + exact_lag.count_text(len(pairs)),
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
    least, as_many, most, groups = (f"Fixed, {way}" for way in (*_FIXED[:1], *_FIXED[2:]))
    similarity, average = "similarity", "noise scale over 16 steps"
    compared = [
        (similarity, least, most, _similarity_scatter),
        (similarity, as_many, groups, _similarity_scatter),
        (average, least, most, _average_scatter),
        (average, as_many, groups, _average_scatter),
    ]
    for policy in _POLICIES:
        few, many = (f"{policy}, {k} micro-batches" for k in (4, 16))
        compared.append(("batch size", few, many, _batch_scatter))
    arms, rows = _by_arm(log), []
    for what, first, second, scatter in compared:
        runs = zip(arms[first], arms[second], strict=True)
        difference = over_seeds([scatter(other) - scatter(one) for one, other in runs])
        matters = difference.seeds > 1 and difference.low * difference.high > 0
        rows.append(
            {
                "scatter of": what,
                "from": first,
                "to": second,
                "difference": difference.text(3, signed=True),
                "verdict": "matters" if matters else "undecided",
            }
        )
    return markdown_table(rows)


def _similarity_scatter(run: Log) -> float:
    return _value(run["step"]["similarity_scatter"])


def _average_scatter(run: Log) -> float:
    return _value(run["averages"]["16 steps"]["estimate"]["scatter"])


def _batch_scatter(run: Log) -> float:
    return _value(run["batch"]["estimate"]["scatter"])


def _branch_table(log: Log) -> str:
    rows = []
    for step in _BRANCH_STEPS:
        tests = [test for test in log["branches"] if test["step"] == step]
        ratios = over_seeds([_log_ratio(test) for test in tests])
        enough = ratios.seeds >= min(_FEWEST_BRANCHES, len(tests))
        inside = verdict([(ratios, -_MAX_RATIO, _MAX_RATIO)])
        below = sum(_value(test["true_scale"]) < _value(test["low"]) for test in tests)
        above = sum(_value(test["true_scale"]) > _value(test["high"]) for test in tests)
        positions = f"{below}, {len(tests) - below - above}, {above}"
        rows.append(
            {
                "steps": str(step),
                "B_simple": _range_text([_value(test["true_scale"]) for test in tests]),
                "B_crit": _range_text([_value(test["critical_batch"]) for test in tests]),
                "ln ratio": ratios.text(signed=True) + ratios.count_text(len(tests)),
                "B_simple below, in, above the interval": positions,
                "no upper end": str(sum(test["high"] == "inf" for test in tests)),
                "verdict": inside if enough or inside == "does not" else "undecided",
            }
        )
    return markdown_table(rows)


def _log_ratio(test: Log) -> float:
    """ln(B_crit / B_simple); nan unless both are positive and finite."""
    critical, scale = _value(test["critical_batch"]), _value(test["true_scale"])
    is_known = 0 < critical < math.inf and 0 < scale < math.inf
    return math.log(critical / scale) if is_known else math.nan


def _value(number: Any) -> float:
    """A number of a log: nan for None."""
    return math.nan if number is None else float(number)


def _failed_share(errors: Sequence[Log]) -> str:
    failures, compared = (sum(one[name] for one in errors) for name in ("failures", "compared"))
    return f"{failures} of {compared:,}"


def _range_text(values: Sequence[float]) -> str:
    """median [least, most] of those that are known."""
    known = [value for value in values if not math.isnan(value)]
    return f"{median(known):.0f} [{min(known):.0f}, {max(known):.0f}]" if known else "none"


# figure


def figure(log: Log) -> list[Panel]:
    """Noise scale and batch sizes of the first seed; scatter by k; branch tests of all seeds."""
    example = log["example"]
    names = {
        "exact": "exact, every 2 steps",
        "truth": "exact, over 16 steps before and after",
        "average": "estimate, over the last 16 steps",
    }
    scales = example["Fixed, 4 micro-batches"]
    lines = [
        _line(name, scales[key], style)
        for style, (key, name) in enumerate(names.items(), start=NEUTRAL)
    ]
    batches = []
    for style, policy in enumerate(_POLICIES, start=2):
        series = example[f"{policy}, 4 micro-batches"]
        batches += [
            _line(policy, series["batch"], style),
            _line(f"{policy} with the truth", series["truth"], style, dotted=True),
        ]
    return [
        Panel("noise scale, fixed batch, k = 4, first seed", "step", lines, y_log=2),
        Panel("batch size, k = 4, first seed; dotted: with the truth", "step", batches, y_log=2),
        _scatter_panel(log),
        _branch_panel(log),
    ]


def _line(name: str, values: Sequence[Any], style: int, **options: Any) -> Series:
    return Series(
        name, range(len(values)), [_value(one) for one in values], style=style, label="", **options
    )


def _scatter_panel(log: Log) -> Panel:
    arms = _by_arm(log)
    measures: dict[str, Callable[[Log], float]] = {
        "similarity of one step": _similarity_scatter,
        "ln B_simple over 16 steps": _average_scatter,
    }
    series = []
    for style, (name, scatter) in enumerate(measures.items(), start=5):
        found = [over_seeds([scatter(run) for run in arms[f"Fixed, {way}"]]) for way in _FIXED]
        ends = [one.low for one in found], [one.high for one in found]
        places, means = range(len(found)), [one.mean for one in found]
        points = Series(name, places, means, low=ends[0], high=ends[1], kind="points", style=style)
        series.append(points)
    title = "scatter by k, mean and 95 % interval over seeds"
    ways = [way.removesuffix(" micro-batches") for way in _FIXED]
    return Panel(title, "micro-batches", series, x_names=ways, y_range=(0.0, 0.6))


def _branch_panel(log: Log) -> Panel:
    tests = log["branches"]
    places = range(len(tests))
    critical = [_value(test["critical_batch"]) for test in tests]
    low = [max(_value(test["low"]), 1.0) for test in tests]
    high = [min(_value(test["high"]), 1e5) for test in tests]
    exact = [_value(test["true_scale"]) for test in tests]
    series = [
        Series("B_crit", places, critical, low=low, high=high, kind="points", style=7),
        Series("exact B_simple", places, exact, kind="points", style=8),
    ]
    title, label = "critical batch of branch tests, 90 % intervals", "steps before the test"
    steps = [str(test["step"]) for test in tests]
    return Panel(title, label, series, y_log=2, x_names=steps)
