"""The report of runs: one HTML file that needs no network, or its curves as one SVG."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from bigbatch.errors import RunError, SettingError, printable
from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.chart_svg import svg, swatch
from bigbatch.log.curve_series import AXES, NOISE_POINTS, POINTS, panels_of
from bigbatch.log.history import History, group_seeds, seeds_of, table_of
from bigbatch.log.paired_differences import Differences, differences_of
from bigbatch.log.series_style import style_of
from bigbatch.log.time_to_score import ScoreTargets
from bigbatch.log.web_page import html_table, text_of, web_page
from bigbatch.policies.controller import lower_bound_note

_ENDINGS = (".html", ".svg")
_EXPLANATION = (
    "Each line is the mean over the runs of an arm at the same number of samples, and its "
    "band runs from the least to the largest run. Point at a line or a name to see it alone; "
    "click a name, or press Enter on it, to keep it; Escape shows all. A point averages part "
    f"of an epoch, or more where there are over {POINTS} epochs; the loss is weighted by "
    "samples. Batch size and learning rate leave out the last step of each epoch, which takes "
    "the samples that remain. The lines of similarity and noise scale are computed from signal "
    f"and noise averaged over all runs of an arm and at least 1/{NOISE_POINTS} of their "
    "samples; an infinite estimate leaves a gap in its line or band."
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
    parts = [*table_sections(histories, against, targets), *curve_sections(histories)]
    write_page(out, title, parts)


def write_page(out: Path, title: str, parts: Iterable[str], extra_style: str = "") -> None:
    """Writes a page of these parts, as HTML, with the style and the script of reports.

    Raises:
        RunError: it cannot be written.
    """
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    style, script = text_of("html_report.css") + extra_style, text_of("html_report.js")
    write_text(out, web_page(title, body, style=style, script=script))


def write_text(out: Path, text: str) -> None:
    """Writes a file atomically.

    Raises:
        RunError: it cannot be written.
    """
    try:
        write_atomically(out, printable(text).encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def note(text: str) -> str:
    """A paragraph of small text."""
    return f'<p class="note">{escape(text)}</p>'


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
        noted = (lower_bound_note(row["decision_reason"] or "") for row in history.rows)
        yield from (note(f"{history.label}: {text}.") for text in noted if text)
    yield from difference_section(differences_of(histories, against))
    if targets is not None:
        yield note(targets.title(histories))
        yield html_table(*targets.table(histories))


def curve_sections(histories: list[History]) -> Iterator[str]:
    """The curves of the runs that have a step, and the settings of all."""
    started = [history for history in histories if history.rows]
    panels = {label: panels_of(started, x) for x, label in AXES.items()}
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
    yield note(_EXPLANATION)
    yield "<h2>Settings</h2>"
    for history in histories:
        lines = "\n".join(f"{name}: {value}" for name, value in history.settings.items())
        yield (
            f"<details><summary>{escape(history.path.name)}</summary><pre>{escape(lines)}</pre>"
            "</details>"
        )
