"""Tables and figure of the comparison of variance-reduced optimizers with their bases."""

import math
from collections.abc import Mapping
from itertools import product
from statistics import fmean

from bigbatch.log.curves import COLORS, add_grid
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bigbatch.log.paired_differences import paired_difference
from bigbatch_recipes.image_classification import GAP
from studies.results.batch_tables import difference_cell, mean_cell, scores_of
from studies.results.markdown import markdown_table
from studies.results.run_log import LoggedRun, RunLog
from studies.results.start_tables import sign_test
from studies.results.variance_reduction import (
    BASE,
    BATCHES,
    BEST_CLIPS,
    CLIPS,
    COMPOSED,
    FACTORS,
    GAMMAS,
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
_COLORS = dict(zip(VERSIONS, ("#777777", *COLORS), strict=False))


def is_stable(run: LoggedRun) -> bool:
    """Whether a training did not diverge and learned: its main score is above that of chance."""
    score = run.score(next(iter(run.scores), ""))
    return score is not None and score > STABLE_ABOVE


def largest_stable_rate(log: RunLog, arm: str) -> tuple[float | None, bool]:
    """The largest rate of the grid that is stable, and whether it is the largest that was tried."""
    runs = log.tuning(arm)
    stable = {run.lr for run in runs} - {run.lr for run in runs if not is_stable(run)}
    largest = max(stable, default=None)
    return largest, largest == max(run.lr for run in runs)


def compare_stable(log: RunLog, optimizer: str, version: str, batch: int) -> str:
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


def advantage(log: RunLog, optimizer: str, version: str, batch: int) -> Scores:
    """Score of a version minus that of its base, by seed."""
    return _minus(*(scores_of(log, arm_of(optimizer, one, batch)) for one in (version, BASE)))


def composite(log: RunLog, version: str, batch: int, score: str | None = None) -> Scores:
    """Mean score over the optimizers of the paper's figure 2, by seed; None where one has none."""
    columns = [scores_of(log, arm_of(one, version, batch), score) for one in COMPOSED]
    return {seed: _mean([column.get(seed) for column in columns]) for seed in columns[0]}


def scores_by_clips(log: RunLog, arm: str) -> dict[tuple[float, float], float | None]:
    """The best held-out score over the rates, by gamma and r_max; None where no rate has one."""
    best: dict[tuple[float, float], float | None] = {}
    for run in log.tuning(arm):
        clips = run.values["gamma"], run.values["r_max"]
        known = (best.get(clips), run.score(next(iter(run.scores), "")))
        best[clips] = max((value for value in known if value is not None), default=None)
    return best


def tables(log: RunLog) -> str:
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
            for version in (*FACTORS, BEST_CLIPS)
        ],
    }
    return "\n\n".join(f"{title}\n\n{markdown_table(rows)}" for title, rows in parts.items())


def _version_cells(log: RunLog, optimizer: str, version: str, batch: int) -> dict[str, str]:
    arm, base = (arm_of(optimizer, one, batch) for one in (version, BASE))
    cells = {"optimizer": optimizer, "batch": f"{batch:,}", "version": version}
    cells |= {"largest stable rate": _stable_cell(log, arm), "rate": _rate_cell(log, arm)}
    for name, score in (("", log.score), (" (gap)", GAP)):
        own = scores_of(log, arm, score)
        difference = paired_difference(own, scores_of(log, base, score))
        cells[score] = mean_cell(list(own.values()), 2)
        cells["minus base" + name] = "" if version == BASE else difference_cell(difference, log)
    return cells


def _stability_cells(log: RunLog, version: str, pairs: list[tuple[str, int]]) -> dict[str, str]:
    found = [compare_stable(log, optimizer, version, batch) for optimizer, batch in pairs]
    counts = {name: found.count(name) for name in ("larger", "smaller", "equal", "open")}
    p = sign_test(counts["larger"], counts["smaller"])
    return {"version": version, **{k: str(n) for k, n in counts.items()}, "p": f"{p:.2g}"}


def _composite_cells(log: RunLog, batch: int) -> dict[str, str]:
    cells = {"batch": f"{batch:,}"}
    for score in (log.score, GAP):
        base = composite(log, BASE, batch, score)
        cells[score] = mean_cell(list(base.values()), 2)
        for version in CLIPS:
            difference = paired_difference(composite(log, version, batch, score), base)
            cells[f"{version}" + " (gap)" * (score == GAP)] = difference_cell(difference, log)
    return cells


def _growth_cells(log: RunLog, optimizer: str) -> dict[str, str]:
    cells = {"optimizer": optimizer}
    for version in CLIPS:
        large, small = (advantage(log, optimizer, version, size) for size in (LARGEST, SMALLEST))
        cells[version] = difference_cell(paired_difference(large, small), log)
    return cells


def _control_cells(log: RunLog, optimizer: str, batch: int) -> dict[str, str]:
    arm, base = (arm_of(optimizer, one, batch) for one in (PRINTED, BASE))
    rate = log.rate(arm)
    own, same = (_held_out(log, one, rate) for one in (arm, base))
    known = own is not None and same is not None
    difference = paired_difference(
        scores_of(log, arm), scores_of(log, mean_rate_of(optimizer, batch))
    )
    return {
        "arm": arm,
        "rate": f"{rate:g}",
        "minus base at the same rate (held-out, one seed)": f"{own - same:+.2f}"  # type: ignore[operator]
        if known
        else "none",
        "minus base at the mean rate": difference_cell(difference, log),
    }


def _refined_cells(log: RunLog, optimizer: str, version: str) -> dict[str, str]:
    arm = arm_of(optimizer, version, LARGEST)
    chosen = {**log.fresh(arm)[0].values, "rate": log.rate(arm)}
    own = scores_of(log, arm)
    cells = {
        "arm": arm,
        "chosen": ", ".join(f"{name} {value:g}" for name, value in chosen.items()),
        log.score: mean_cell(list(own.values()), 2),
    }
    for other in (BASE, PRINTED):
        reference = scores_of(log, arm_of(optimizer, other, LARGEST))
        cells[f"minus {other}"] = difference_cell(paired_difference(own, reference), log)
    return cells


def _stable_cell(log: RunLog, arm: str) -> str:
    rate, is_last = largest_stable_rate(log, arm)
    return "none" if rate is None else f"{rate:g}" + " or more" * is_last


def _rate_cell(log: RunLog, arm: str) -> str:
    return f"{log.rate(arm):g}" + " (edge)" * log.at_edge(arm)


def _held_out(log: RunLog, arm: str, rate: float) -> float | None:
    """Mean held-out score of the tuning runs of an arm at a rate; None without one."""
    runs = [run for run in log.tuning(arm) if run.lr == rate]
    return _mean([run.score(next(iter(run.scores), "")) for run in runs])


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


def figure(log: RunLog) -> Figure:
    """Score against batch for each optimizer and their composite, stable rates, best clips."""
    drawn = Figure(figsize=(13, 6), layout="constrained")
    panels = drawn.subplots(2, len(COMPOSED))
    for axes, optimizer in zip(panels[0], COMPOSED, strict=True):
        columns = {
            version: [scores_of(log, arm_of(optimizer, version, size)) for size in _sizes()]
            for version in VERSIONS
        }
        _curves(axes, columns, optimizer)
    composites = {
        version: [composite(log, version, size) for size in _sizes()] for version in VERSIONS
    }
    _curves(panels[1][0], composites, "composite: mean of the four above")
    panels[0][0].set_ylabel(log.score)
    panels[1][0].set_ylabel(log.score)
    _stable_ratios(panels[1][1], log)
    for axes, optimizer in zip(panels[1][2:], REFINED, strict=True):
        _heat_map(axes, log, optimizer)
    drawn.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return drawn


def _curves(axes: Axes, columns: Mapping[str, list[Scores]], title: str) -> None:
    """Mean score of each version against the batch, with the range over the seeds."""
    for version, scores in columns.items():
        known = [[one for one in by_seed.values() if one is not None] for by_seed in scores]
        means = [fmean(one) if one else math.nan for one in known]
        low, high = ([pick(one, default=math.nan) for one in known] for pick in (min, max))
        axes.plot(_sizes(), means, "o-", color=_COLORS[version], markersize=3, label=version)
        axes.fill_between(_sizes(), low, high, color=_COLORS[version], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(_sizes(), [f"{size:,}" for size in _sizes()])
    axes.set_xlabel("batch")
    axes.set_title(title, fontsize=9, loc="left")
    add_grid(axes)


def _stable_ratios(axes: Axes, log: RunLog) -> None:
    """Largest stable rate of each version over that of its base; open markers at a grid's end."""
    pairs = [(optimizer, batch) for optimizer, batches in BATCHES.items() for batch in batches]
    for shift, version in zip((-0.15, 0.15), CLIPS, strict=True):
        for place, (optimizer, batch) in enumerate(pairs):
            own, base = (
                largest_stable_rate(log, arm_of(optimizer, one, batch))[0]
                for one in (version, BASE)
            )
            if own is not None and base is not None:
                is_open = compare_stable(log, optimizer, version, batch) == "open"
                fill = "none" if is_open else _COLORS[version]
                axes.plot(own / base, place + shift, "o", color=_COLORS[version], mfc=fill, ms=4)
    axes.axvline(1.0, color="#777777", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(pairs)), [f"{name}; {batch}" for name, batch in pairs], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(
        "largest stable rate over the base's\n(hollow: a grid ends)", fontsize=9, loc="left"
    )
    add_grid(axes)


def _heat_map(axes: Axes, log: RunLog, optimizer: str) -> None:
    """Held-out score of each pair of clips, at the best rate of each."""
    scores = scores_by_clips(log, arm_of(optimizer, BEST_CLIPS, LARGEST))
    r_maxes = tuple(CLIPS.values())
    values = [
        [math.nan if (one := scores.get((gamma, r_max))) is None else one for r_max in r_maxes]
        for gamma in GAMMAS
    ]
    axes.imshow(values, aspect="auto", cmap="viridis", alpha=0.5)
    for row, column in product(range(len(GAMMAS)), range(len(r_maxes))):
        text = f"{values[row][column]:.1f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(r_maxes)), [f"{value:g}" for value in r_maxes])
    axes.set_yticks(range(len(GAMMAS)), [f"{value:g}" for value in GAMMAS])
    axes.set_xlabel("r_max")
    axes.set_ylabel("gamma")
    title = f"vr-{optimizer}; {LARGEST:,}\nheld-out accuracy, %, one seed"
    axes.set_title(title, fontsize=9, loc="left")
