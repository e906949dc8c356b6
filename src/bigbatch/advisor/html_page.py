"""The advice as one HTML file, which needs no network."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from bigbatch.advisor import text_page
from bigbatch.advisor.batch_advice import BatchAdvice
from bigbatch.advisor.lines_to_add import lines_to_add
from bigbatch.advisor.loss_curve import window_of
from bigbatch.advisor.trial_result import TrialResult, sentences
from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.log.series_style import NEUTRAL
from bigbatch.log.web_page import Tile, details, html_table, note, text_of, tiles, web_page

_CURVE = 64  # batch sizes of the curve of times
_SIZE = 420, 250  # of a chart
_ROOM = 8.0  # factor beyond trend and interval up to which single steps are shown in place
_EDGE = 1.3  # factor from the edge at which the others are


def html_page(advice: BatchAdvice) -> str:
    """The page."""
    refused = f"<h1>No advice</h1>\n<p>{escape(advice.refusal)}</p>"
    body = refused if advice.refusal else "\n".join(_body(advice))
    style = text_of("html_page.css", "bigbatch.advisor")
    return web_page("Batch size advice", body, style=style)


def _body(advice: BatchAdvice) -> Iterator[str]:
    yield f"<h1>{escape(text_page.conclusion(advice))}</h1>"
    yield _tiles(advice)
    if advice.trial is not None:
        yield _section("Tried", sentences(advice.trial))
        yield _trial_chart(advice.trial)
    yield _section("Noise", text_page.noise(advice))
    if chart := _noise_chart(advice):
        yield f"<h2>How the noise scale moved</h2>\n{chart}"
    if advice.this_machine is not None:
        yield f"<h2>Time to the same progress, by batch size</h2>\n{_time_chart(advice)}"
        yield "<h2>On more devices</h2>"
        yield html_table(text_page.DEVICE_COLUMNS, map(text_page.device_cells, advice.devices))
        yield from map(note, text_page.device_notes(advice))
    yield from itertools.starmap(_section, text_page.sections(advice))
    if lines := lines_to_add(advice):
        yield "<h2>Lines to add</h2>"
    for number, (trainer, text) in enumerate(lines.items()):
        yield details(trainer, text, is_open=number == 0)  # the observed one


def _section(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>"


def _tiles(advice: BatchAdvice) -> str:
    """The advice in a few numbers; "" where no size is advised."""
    row, present = advice.this_machine, advice.found.batch_size
    if row is None:
        return ""
    batch = row.batch_size
    same = "to the same progress"
    facts = [
        Tile("batch", f"{batch:,}", "as it is" if batch == present else f"now {present:,}"),
        Tile("time", f"x {row.time:.2f}", same),
        Tile("samples", f"x {row.samples:.2f}", same),
    ]
    for name in advice.found.optimizers:
        factor = advice.lr_factor(batch, name)
        facts.append(Tile("learning rate", f"x {factor:.3g}", f"of {name}"))
    return tiles(facts)


def _noise_chart(advice: BatchAdvice) -> str:
    """Each measured step, the trend, and the mean with its interval; "" where no step has any."""
    trend, last = advice.trend, advice.observations.steps
    steps = advice.measurements
    segments = [one for one in trend.segments if 0 < one.noise_scale < math.inf]
    known = [trend.noise_scale, trend.low, trend.high, *(one.noise_scale for one in segments)]
    known = [value for value in known if 0 < value < math.inf]
    if not known:
        return ""
    present = advice.found.batch_size
    ends = min(*known, present) / _ROOM, max(*known, present) * _ROOM
    scales = [one.statistics.noise_scale for one in steps]
    beyond = [not ends[0] < scale < ends[1] for scale in scales]
    points = Series(
        "a measured step (hollow: beyond the axis, or no signal)",
        [one.step for one in steps],
        [min(max(scale, ends[0] * _EDGE), ends[1] / _EDGE) for scale in scales],
        kind="points",
        hollow=beyond,
        style=NEUTRAL,
    )
    moved = Series(
        "mean of some steps",
        [(one.first + one.last) / 2 for one in segments],
        [one.noise_scale for one in segments],
        markers=True,
        style=1,
    )
    later = [steps[len(steps) // 2].step, last]
    mean = Series(
        "what the advice takes, with its 90 % interval",
        later,
        [trend.noise_scale] * 2,
        low=[max(trend.low, ends[0])] * 2,
        high=[min(trend.high, ends[1])] * 2,
        style=0,
    )
    marks = [Mark(f"present batch {present:,}", y=present)]
    lines = [points, moved, mean] if math.isfinite(trend.noise_scale) else [points, moved]
    axes = "noise scale, samples", "optimizer step"
    return _chart(*axes, lines, marks=marks, x_range=(0.0, float(last)), y_range=ends, y_log=10)


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
    return _chart(label, "seconds of training", lines, y_log=10 if is_log else None)


def _time_chart(advice: BatchAdvice) -> str:
    """The time of batch sizes around the present and the advised one."""
    row, present = advice.this_machine, advice.found.batch_size
    assert row is not None
    low, high = min(present, row.batch_size) / 8, max(present, row.batch_size) * 8
    low = max(advice.found.ranks, low)
    sizes = [low * (high / low) ** (i / _CURVE) for i in range(_CURVE + 1)]
    times = Series("time", sizes, [advice.relative_time(size) for size in sizes])
    marks = [Mark(f"present {present:,}", x=present)]
    if row.batch_size != present:
        marks.append(Mark(f"advised {row.batch_size:,}", x=row.batch_size))
    return _chart("time, present = 1", "batch size", [times], marks=marks, x_log=10, y_log=10)


def _chart(y: str, x: str, series: Sequence[Series], **settings: Any) -> str:
    panel = Panel(y, x, series, y_label=y, size=_SIZE, **settings)
    return svg([panel], titles=False, key=len(series) > 1)
