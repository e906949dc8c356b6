"""Tables and figure of the comparison of variance-reduced optimizers with their bases."""

import math
from collections.abc import Mapping
from itertools import product
from statistics import fmean

from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.paired_differences import paired_difference
from bigbatch.log.series_style import NEUTRAL
from bigbatch_recipes.image_classification import GAP
from studies.markdown_tables import Row, markdown_table
from studies.results.any_start import sign_test
from studies.results.batch_tables import difference_cell, mean_cell
from studies.results.comparison_log import ComparisonLog, LoggedRun
from studies.results.variance_reduction import (
    BASE,
    BATCHES,
    BEST_CLIPS,
    CLIPS,
    COMPOSED,
    LARGEST,
    PRINTED,
    REFINED,
    SHORTENED,
    SMALLEST,
    STABLE_ABOVE,
    arm_of,
    mean_rate_of,
)

Scores = dict[int, float | None]  # by seed

VERSIONS = (BASE, *CLIPS)
_REMOVED = ("shrinkage", "positive-part")  # other formulas of r, which only the kept log has


def is_stable(run: LoggedRun) -> bool:
    """Whether a training did not diverge and learned: its main score is above that of chance."""
    score = run.main_score
    return score is not None and score > STABLE_ABOVE


def largest_stable_rate(log: ComparisonLog, arm: str) -> tuple[float | None, bool]:
    """The largest rate of the grid that is stable, and whether it is the largest that was tried."""
    runs = log.tuning(arm)
    stable = {run.lr for run in runs} - {run.lr for run in runs if not is_stable(run)}
    largest = max(stable, default=None)
    return largest, largest == max(run.lr for run in runs)


def compare_stable(log: ComparisonLog, optimizer: str, version: str, batch: int) -> str:
    """How the largest stable rate of a version compares with that of its base.

    Returns:
        "larger", "smaller" or "equal"; "open" where the end of a grid hides it.
    """
    own, own_is_last = largest_stable_rate(log, arm_of(optimizer, version, batch))
    base, base_is_last = largest_stable_rate(log, arm_of(optimizer, BASE, batch))
    if own is None or base is None:
        return "open"
    if own > base:
        return "open" if base_is_last else "larger"
    if own < base:
        return "open" if own_is_last else "smaller"
    return "open" if own_is_last or base_is_last else "equal"


def advantage(log: ComparisonLog, optimizer: str, version: str, batch: int) -> Scores:
    """Score of a version minus that of its base, by seed."""
    return _minus(*(log.scores(arm_of(optimizer, one, batch)) for one in (version, BASE)))


def composite(log: ComparisonLog, version: str, batch: int, score: str | None = None) -> Scores:
    """Mean score over the optimizers of the paper's figure 2, by seed; None where one has none."""
    columns = [log.scores(arm_of(one, version, batch), score) for one in COMPOSED]
    return {seed: _mean([column.get(seed) for column in columns]) for seed in columns[0]}


def tables(log: ComparisonLog) -> str:
    """The versions, what decides each hypothesis, and the controls."""
    pairs = [(optimizer, batch) for optimizer, batches in BATCHES.items() for batch in batches]
    parts = {
        "Each optimizer, and its versions with both upper clips:": [
            _version_cells(log, optimizer, version, batch)
            for (optimizer, batch), version in product(pairs, VERSIONS)
        ],
        "Largest stable rate, compared with that of the base:": [
            _stability_cells(log, version, pairs) for version in CLIPS
        ],
        f"Composite of {', '.join(COMPOSED)}:": [_composite_cells(log, size) for size in _sizes()],
        f"Difference from the base with {LARGEST:,} samples, minus that with {SMALLEST}:": [
            _growth_cells(log, optimizer) for optimizer in COMPOSED
        ],
        "Controls of r_max 1:": [
            _control_cells(log, optimizer, batch)
            for optimizer in SHORTENED
            for batch in BATCHES[optimizer]
        ],
        f"More versions, with {LARGEST:,} samples:": [
            _refined_cells(log, optimizer, version)
            for optimizer in REFINED
            for version in (*_REMOVED, BEST_CLIPS)
            if log.fresh(arm_of(optimizer, version, LARGEST))
        ],
    }
    return "\n\n".join(f"{title}\n\n{markdown_table(rows)}" for title, rows in parts.items())


def _version_cells(log: ComparisonLog, optimizer: str, version: str, batch: int) -> Row:
    arm, base = (arm_of(optimizer, one, batch) for one in (version, BASE))
    cells = {"optimizer": optimizer, "batch": f"{batch:,}", "version": version}
    cells |= {"largest stable rate": _stable_cell(log, arm), "rate": log.rate_text(arm)}
    for name, score in (("", log.score), (" (gap)", GAP)):
        own = log.scores(arm, score)
        difference = paired_difference(own, log.scores(base, score))
        cells[score] = mean_cell(own.values(), 2)
        cells["minus base" + name] = "" if version == BASE else difference_cell(difference, log)
    return cells


def _stability_cells(log: ComparisonLog, version: str, pairs: list[tuple[str, int]]) -> Row:
    found = [compare_stable(log, optimizer, version, batch) for optimizer, batch in pairs]
    counts = {name: found.count(name) for name in ("larger", "smaller", "equal", "open")}
    p = sign_test(counts["larger"], counts["smaller"])
    return {"version": version, **{k: str(n) for k, n in counts.items()}, "p": f"{p:.2g}"}


def _composite_cells(log: ComparisonLog, batch: int) -> Row:
    cells = {"batch": f"{batch:,}"}
    for score in (log.score, GAP):
        base = composite(log, BASE, batch, score)
        cells[score] = mean_cell(base.values(), 2)
        for version in CLIPS:
            difference = paired_difference(composite(log, version, batch, score), base)
            cells[f"{version}" + " (gap)" * (score == GAP)] = difference_cell(difference, log)
    return cells


def _growth_cells(log: ComparisonLog, optimizer: str) -> Row:
    cells = {"optimizer": optimizer}
    for version in CLIPS:
        large, small = (advantage(log, optimizer, version, size) for size in (LARGEST, SMALLEST))
        cells[version] = difference_cell(paired_difference(large, small), log)
    return cells


def _control_cells(log: ComparisonLog, optimizer: str, batch: int) -> Row:
    arm, base = (arm_of(optimizer, one, batch) for one in (PRINTED, BASE))
    rate = log.rate(arm)
    own, same = (_held_out(log, one, rate) for one in (arm, base))
    known = own is not None and same is not None
    difference = paired_difference(log.scores(arm), log.scores(mean_rate_of(optimizer, batch)))
    return {
        "arm": arm,
        "rate": f"{rate:g}",
        "minus base at the same rate (held-out, one seed)": f"{own - same:+.2f}"  # type: ignore[operator]
        if known
        else "none",
        "minus base at the mean rate": difference_cell(difference, log),
    }


def _refined_cells(log: ComparisonLog, optimizer: str, version: str) -> Row:
    arm = arm_of(optimizer, version, LARGEST)
    chosen = {**log.fresh(arm)[0].values, "rate": log.rate(arm)}
    own = log.scores(arm)
    cells = {
        "arm": arm,
        "chosen": ", ".join(f"{name} {value:g}" for name, value in chosen.items()),
        log.score: mean_cell(own.values(), 2),
    }
    for other in (BASE, PRINTED):
        reference = log.scores(arm_of(optimizer, other, LARGEST))
        cells[f"minus {other}"] = difference_cell(paired_difference(own, reference), log)
    return cells


def _stable_cell(log: ComparisonLog, arm: str) -> str:
    rate, is_last = largest_stable_rate(log, arm)
    return "none" if rate is None else f"{rate:g}" + " or more" * is_last


def _held_out(log: ComparisonLog, arm: str, rate: float) -> float | None:
    """Mean held-out score of the tuning runs of an arm at a rate; None without one."""
    runs = [run for run in log.tuning(arm) if run.lr == rate]
    return _mean([run.main_score for run in runs])


def _minus(own: Mapping[int, float | None], other: Mapping[int, float | None]) -> Scores:
    """Differences by seed; None where one of both is not known."""
    pairs = {seed: (own[seed], other[seed]) for seed in own if seed in other}
    return {
        seed: None if one is None or two is None else one - two
        for seed, (one, two) in pairs.items()
    }


def _mean(values: list[float | None]) -> float | None:
    """The mean; None where a value is not known, or there is none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _sizes() -> tuple[int, ...]:
    return BATCHES[COMPOSED[0]]


# figure


def figure(log: ComparisonLog) -> list[Panel]:
    """Score against batch for each optimizer and their composite, and stable rates."""
    curves = [
        _curves(optimizer, [_scores(log, optimizer, version) for version in VERSIONS])
        for optimizer in COMPOSED
    ]
    mean = [[composite(log, version, size) for size in _sizes()] for version in VERSIONS]
    return [*curves, _curves("composite: mean of the four", mean), _stable_ratios(log)]


def _scores(log: ComparisonLog, optimizer: str, version: str) -> list[Scores]:
    return [log.scores(arm_of(optimizer, version, size)) for size in _sizes()]


def _curves(title: str, versions: list[list[Scores]]) -> Panel:
    """Mean score of each version against the batch, with the range over the seeds."""
    series = []
    for style, (version, scores) in enumerate(zip(VERSIONS, versions, strict=True), start=NEUTRAL):
        known = [[one for one in by_seed.values() if one is not None] for by_seed in scores]
        low, high = ([pick(one, default=math.nan) for one in known] for pick in (min, max))
        means = [fmean(one) if one else math.nan for one in known]
        series.append(
            Series(version, _sizes(), means, low=low, high=high, markers=True, style=style)
        )
    return Panel(f"test accuracy, %: {title}", "batch", series, x_log=2)


def _stable_ratios(log: ComparisonLog) -> Panel:
    """Largest stable rate of each version over that of its base; hollow at a grid's end."""
    pairs = [(optimizer, batch) for optimizer, batches in BATCHES.items() for batch in batches]
    series = []
    for style, version in enumerate(CLIPS):
        places, ratios, hollow = [], [], []
        for place, (optimizer, batch) in enumerate(pairs):
            own, base = (
                largest_stable_rate(log, arm_of(optimizer, one, batch))[0]
                for one in (version, BASE)
            )
            if own is not None and base is not None:
                places.append(place + 0.3 * style - 0.15)
                ratios.append(own / base)
                hollow.append(compare_stable(log, optimizer, version, batch) == "open")
        series.append(Series(version, ratios, places, kind="points", hollow=hollow, style=style))
    return Panel(
        "largest stable rate over the base's (hollow: a grid ends)",
        "ratio",
        series,
        x_log=2,
        y_names=[f"{optimizer} {batch}" for optimizer, batch in pairs],
        marks=[Mark("", x=1.0)],
        size=(400, 300),
    )
