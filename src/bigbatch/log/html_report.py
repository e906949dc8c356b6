"""The report of runs: one HTML file that needs no network, or its curves as one SVG.

A page begins with one sentence, which says what the tables below it say, and a tile for each arm.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from bigbatch.errors import RunError, SettingError, printable
from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.chart_svg import svg, swatch
from bigbatch.log.curve_series import AXES, LOSS, NOISE_POINTS, POINTS, panels_of
from bigbatch.log.history import (
    History,
    counted_of,
    group_seeds,
    main_score,
    mean_text,
    seeds_of,
    table_of,
    unit_of,
)
from bigbatch.log.paired_differences import Differences, differences_of, listed
from bigbatch.log.series_style import style_of
from bigbatch.log.time_to_score import ScoreTargets
from bigbatch.log.web_page import Tile, details, html_table, note, text_of, tiles, web_page
from bigbatch.policies.bound_notes import note_of

_ENDINGS = (".html", ".svg")
_MOST_TILES = 8
_SMOOTHED = 5  # points of the training loss, to compare runs by it
_EXPLANATION = (
    "Each line is the mean over the runs of an arm at the same number of samples, and its "
    "band runs from the least to the largest run. Point at a line or a name to see it alone; "
    "click a name, or press Enter on it, to keep it; Escape shows all. A point averages part "
    f"of an epoch, or more where there are over {POINTS} epochs; the loss is weighted by "
    "samples. Batch size and learning rate leave out the last step of each epoch, which takes "
    "the samples that remain. The lines of similarity and noise scale are computed from signal "
    f"and noise averaged over all runs of an arm and at least 1/{NOISE_POINTS} of their "
    "samples; an infinite estimate leaves a gap in its line or band. The axis of a score has room "
    "for the last quarter of the curves; what is outside is left out."
)

_CONSECUTIVE = (
    "measured values compare two consecutive steps. What the first step changes counts as noise, "
    "so such a noise scale is usually too high, the more the longer the steps are."
)


def require_ending(out: Path, endings: Sequence[str] = _ENDINGS) -> None:
    """Raises SettingError where the file would be of another kind."""
    if out.suffix not in endings:
        advice = f"; figures are SVG: {out.with_suffix('.svg').name}" * (out.suffix == ".png")
        raise SettingError(f"-o {out}: the ending must be {' or '.join(endings)}{advice}")


def write_report(
    histories: list[History],
    out: Path,
    title: str,
    *,
    against: str | None = None,
    targets: ScoreTargets | None = None,
) -> None:
    """Writes a report of runs side by side: a `.html` page, or the curves alone as `.svg`.

    It has differences from the arm `against`, the first where there is none of this name, and the
    time to reach each of the `targets`.

    Raises:
        SettingError: another ending.
        RunError: no run has a step yet, or the file cannot be written.
    """
    require_ending(out)
    started = [history for history in histories if history.rows]
    if not started:
        raise RunError(f"{title}: no step is logged yet, so there is nothing to report")
    if out.suffix == ".svg":
        write_text(out, svg(panels_of(started, "samples"), columns=2, key=True, standalone=True))
        return
    sentence = headline(started, differences_of(histories, against))
    parts = [_tiles(started), *table_sections(histories, against, targets)]
    write_page(out, title, sentence, [*parts, *curve_sections(histories)])


def write_page(
    out: Path, title: str, sentence: str, parts: Iterable[str], extra_style: str = ""
) -> None:
    """Writes a page of a sentence and these parts, as HTML, with the style of reports.

    Raises:
        RunError: it cannot be written.
    """
    body = "\n".join([note(title), f"<h1>{escape(sentence)}.</h1>", *parts])
    style, script = text_of("html_report.css") + extra_style, text_of("html_report.js")
    write_text(out, web_page(title, body, style=style, script=script))


def headline(histories: list[History], differences: Differences | None) -> str:
    """What the runs show, in one sentence: how they end, and which differences are tested."""
    groups = group_seeds(histories)
    if differences is not None and differences.is_tested:
        return differences.verdict + "; lower is better" * (not histories[0].higher_is_better)
    label, ends = _ends(histories)
    if len(groups) == 1:
        (name, runs), *_ = groups.items()
        seeds = f" in {len(runs)} runs" * (len(runs) > 1)
        return f"{name} ends{seeds} at {label} {ends[name]}, after {_cost(runs)}"
    untested = "one run each"
    if len(groups) < len(histories):
        arms = differences.arms.values() if differences else ()
        untested = " and ".join(sorted({one.result for one in arms})) or "no score"
    if main_score(histories) is None and (times := _times_to_loss(histories)):
        return f"{times}; {untested}, so chance is not excluded"
    listing = listed([f"{name} {end}" for name, end in ends.items()])
    return f"{label[:1].upper()}{label[1:]}: {listing}; {untested}, so no difference is tested"


def _ends(histories: list[History]) -> tuple[str, dict[str, str]]:
    """The name of the main score, and the last one of each arm; of the loss without scores."""
    score = main_score(histories)
    label, unit, factor = unit_of(histories, score) if score else (LOSS, "", 1.0)
    ends = {}
    for name, runs in group_seeds(histories).items():
        found = [run.last(score) if score else run.final_loss for run in runs]
        values = [factor * value for value in found if value is not None]
        scale = math.floor(math.log10(abs(fmean(values)) or 1)) if values else 0
        text = mean_text(values, 1 if unit else max(0, 2 - scale)) + unit if values else "unknown"
        text += " (unfinished)" * (not all(run.finished for run in runs))
        ends[name] = text + " (diverged)" * any(run.divergence for run in runs)
    return label, ends


def _cost(runs: list[History]) -> str:
    """Steps, mean batch size and seconds of an arm."""
    steps, batch = fmean(run.steps for run in runs), fmean(run.average_batch for run in runs)
    seconds = fmean(run.rows[-1]["elapsed_seconds"] for run in runs)
    return f"{steps:,.0f} steps of {batch:,.0f} {counted_of(runs)}, {_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 100 else f"{seconds / 60:,.1f} min"


def _times_to_loss(histories: list[History]) -> str:
    """Seconds and samples of each arm to the lowest loss that all reach; "" where one has none."""
    by_samples, by_seconds = (panels_of(histories, x)[0] for x in ("samples", "elapsed_seconds"))
    if by_samples.title != LOSS or len(by_samples.series) < len(group_seeds(histories)):
        return ""
    losses, counted = [_smoothed(line.y) for line in by_samples.series], counted_of(histories)
    target = max(map(min, losses))
    texts = []
    for line, samples, seconds in zip(losses, by_samples.series, by_seconds.series, strict=True):
        place = next(number for number, loss in enumerate(line) if loss <= target)
        time = _seconds(seconds.x[place])
        texts.append(f"{time} and {samples.x[place]:,.0f} {counted} with {samples.name}")
    return f"A training loss of {target:.3g}, which all reach, takes {', '.join(texts)}"


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, of `_SMOOTHED` in all."""
    parts = (values[max(0, end - _SMOOTHED) : end] for end in range(1, len(values) + 1))
    return [fmean(part) for part in parts]


def _tiles(histories: list[History]) -> str:
    """A tile for each arm: how it ends, and what it takes; of one arm, each of its numbers."""
    (columns, rows), (label, ends) = table_of(histories), _ends(histories)
    if len(rows) == 1:
        return tiles(map(Tile, columns[1:], rows[0][1:]))
    groups = [*group_seeds(histories).items()][:_MOST_TILES]
    return tiles(
        Tile(name, ends[name], f"{label}, {_cost(runs)}", style_of(arm).color)
        for arm, (name, runs) in enumerate(groups)
    )


def write_text(out: Path, text: str) -> None:
    """Writes a file atomically.

    Raises:
        RunError: it cannot be written.
    """
    try:
        write_atomically(out, printable(text).encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def difference_section(differences: Differences | None) -> Iterator[str]:
    """The table of differences; nothing where there is no other arm."""
    if differences is not None:
        yield note(differences.title)
        yield html_table(*differences.table())


def table_sections(
    histories: list[History], against: str | None = None, targets: ScoreTargets | None = None
) -> Iterator[str]:
    """The table of runs, which counts those without a step; differences; times to scores."""
    yield note(
        f"Table: {seeds_of(histories)}. Average batch is the mean over the steps that were not "
        "skipped."
    )
    yield html_table(*table_of(histories))
    for history in histories:
        noted = (note_of(row["decision_reason"] or "") for row in history.rows)
        yield from (note(f"{history.label}: {text}.") for text in noted if text)
    yield from difference_section(differences_of(histories, against))
    if targets is not None:
        yield note(targets.title(histories))
        yield html_table(*targets.table(histories))


def curve_sections(histories: list[History]) -> Iterator[str]:
    """The curves of the runs that have a step, and the settings of all."""
    started = [history for history in histories if history.rows]
    counted = counted_of(started)
    panels = {label.replace("samples", counted): panels_of(started, x) for x, label in AXES.items()}
    yield '<h2>Curves</h2>\n<div class="arms"><div class="keys" role="group" aria-label="arms">'
    for arm, name in enumerate(group_seeds(started)):
        yield (  # a click keeps the arm in view
            f'<button type="button" class="key {style_of(arm).color}" data-series="{arm}" '
            f'aria-pressed="false">{swatch(arm)}{escape(name)}</button>'
        )
    yield '</div>\n<div class="tabs">'
    for number, label in enumerate(panels, start=1):
        checked = " checked" * (number == 1)
        yield f'<input type="radio" name="axis" id="tab{number}"{checked}>'
        yield f'<label for="tab{number}">against {label}</label>'
    for number, of_axis in enumerate(panels.values(), start=1):
        yield f'<section class="panels" id="panel{number}">'
        for panel in of_axis:
            caption = f"<figcaption>{escape(panel.title)}<output></output></figcaption>"
            yield f"<figure>{caption}{svg([panel], titles=False)}</figure>"
        yield "</section>"
    yield "</div>\n</div>"
    yield note(_EXPLANATION.replace("samples", counted))
    for history in started:
        count = len([row for row in history.rows if row.get("compared") == "consecutive steps"])
        if count:
            yield note(f"{history.label}: {count} {_CONSECUTIVE}")
    yield "<h2>Settings</h2>"
    for history in histories:
        lines = (f"{name}: {value}" for name, value in history.settings.items())
        yield details(history.path.name, "\n".join(lines))
