"""The advice as one HTML file, which needs no network."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from bigbatch.advisor.batch_advice import BatchAdvice
from bigbatch.advisor.lines_to_add import lines_to_add
from bigbatch.advisor.loss_curve import window_of
from bigbatch.advisor.text_page import (
    DEVICE_COLUMNS,
    conclusion,
    device_cells,
    device_notes,
    noise,
    sections,
)
from bigbatch.advisor.trial_result import TrialResult, sentences
from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.log.web_page import html_table, text_of, web_page

_SIZE = 640, 260  # of a chart
_CURVE = 64  # batch sizes of the curve of times


def html_page(advice: BatchAdvice) -> str:
    """The page."""
    refused = f"<h1>No advice</h1>\n<p>{escape(advice.refusal)}</p>"
    body = refused if advice.refusal else "\n".join(_body(advice))
    style = text_of("html_page.css", "bigbatch.advisor")
    return web_page("Batch size advice", body, style=style)


def _body(advice: BatchAdvice) -> Iterator[str]:
    yield f"<h1>{escape(conclusion(advice))}</h1>"
    if advice.trial is not None:
        yield _section("Tried", sentences(advice.trial))
        yield _trial_chart(advice.trial)
    yield _section("Noise", noise(advice))
    if len(advice.trend.segments) > 1:
        yield f"<h2>How the noise scale moved</h2>\n{_noise_chart(advice)}"
    if advice.this_machine is not None:
        yield f"<h2>Time to the same progress, by batch size</h2>\n{_time_chart(advice)}"
        yield f"<h2>On more devices</h2>\n{_devices_table(advice)}"
    yield from itertools.starmap(_section, sections(advice))
    yield from _lines(advice)


def _section(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>"


def _noise_chart(advice: BatchAdvice) -> str:
    segments = [one for one in advice.trend.segments if 0 < one.noise_scale < math.inf]
    steps = [(one.first + one.last) / 2 for one in segments]
    scales = Series("noise scale", steps, [one.noise_scale for one in segments])
    marks = [Mark("present batch", y=advice.found.batch_size)]
    return _chart("noise scale, samples", "optimizer step", scales, marks)


def _trial_chart(result: TrialResult) -> str:
    """Loss against time, a line for each run."""
    if not result.curves:
        return ""
    window = window_of(result.curves)
    lines = []
    for curve in result.curves:
        seconds, _, losses = curve.means(window)
        name = f"batch {curve.batch_size}"
        style = int(curve.batch_size == result.tried)
        lines.append(Series(name, seconds.tolist(), losses.tolist(), style=style))
    is_log = all(value > 0 for line in lines for value in line.y)
    label = f"training loss, means over {window:,.0f} samples"
    panel = Panel(label, "seconds of training", lines, y_log=10 if is_log else None, size=_SIZE)
    return svg([panel], titles=False)


def _time_chart(advice: BatchAdvice) -> str:
    row, present = advice.this_machine, advice.found.batch_size
    assert row is not None
    low, high = min(present, row.batch_size) / 8, max(present, row.batch_size) * 8
    sizes = [max(1.0, low) * (high / max(1.0, low)) ** (i / _CURVE) for i in range(_CURVE + 1)]
    times = Series("time", sizes, [advice.relative_time(size) for size in sizes])
    marks = [Mark("present", x=present), Mark("fastest", x=row.batch_size)]
    return _chart("time, present = 1", "batch size", times, marks, x_log=10)


def _chart(y: str, x: str, series: Series, marks: Sequence[Mark], x_log: int | None = None) -> str:
    """A line on a logarithmic axis, with what to compare it with; "" for a line without a point."""
    if not series.y:
        return ""
    panel = Panel(
        f"{series.name}: {y}",
        x,
        [series],
        y_label=y,
        x_log=x_log,
        y_log=10,
        marks=marks,
        size=_SIZE,
    )
    return svg([panel], titles=False)


def _devices_table(advice: BatchAdvice) -> str:
    table = html_table(DEVICE_COLUMNS, map(device_cells, advice.devices))
    notes = (f'<p class="note">{escape(note)}</p>' for note in device_notes(advice))
    return "\n".join((table, *notes))


def _lines(advice: BatchAdvice) -> Iterator[str]:
    found = lines_to_add(advice)
    if found:
        yield "<h2>Lines to add</h2>"
    for trainer, lines in found.items():
        state = " open" if trainer == next(iter(found)) else ""  # the observed one
        yield f"<details{state}><summary>{escape(trainer)}</summary>"
        yield f"<pre>{escape(lines)}</pre></details>"
