"""The advice as one HTML file, which needs no network."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from bigbatch.advisor.batch_advice import BatchAdvice
from bigbatch.advisor.lines_to_add import lines_to_add
from bigbatch.advisor.svg_chart import Line, Mark, log_chart
from bigbatch.advisor.text_page import (
    DEVICE_COLUMNS,
    conclusion,
    device_cells,
    device_notes,
    number,
    sections,
)

_CURVE = 64  # batch sizes of the curve of times


def html_page(advice: BatchAdvice) -> str:
    """The page."""
    style = resources.files("bigbatch.advisor").joinpath("html_page.css").read_text()
    body = "\n".join(_refused(advice) if advice.refusal else _body(advice))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="bigbatch">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Batch size advice</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _refused(advice: BatchAdvice) -> Iterator[str]:
    yield f"<h1>No advice</h1>\n<p>{escape(advice.refusal)}</p>"


def _body(advice: BatchAdvice) -> Iterator[str]:
    yield f"<h1>{escape(conclusion(advice))}</h1>"
    yield from _cards(advice)
    if len(advice.trend.segments) > 1:
        yield f"<h2>How the noise scale moved</h2>\n{_noise_chart(advice)}"
    if advice.this_machine is not None:
        yield f"<h2>Time to the same progress, by batch size</h2>\n{_time_chart(advice)}"
        yield f"<h2>On more devices</h2>\n{_devices_table(advice)}"
    yield "<h2>Layers with the most noise</h2>" + _layers_table(advice)
    for title, lines in sections(advice):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        yield f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>"
    yield from _lines(advice)


def _cards(advice: BatchAdvice) -> Iterator[str]:
    trend, row, found = advice.trend, advice.this_machine, advice.found
    cards = [("present batch", f"{found.batch_size:,}", f"{found.optimizer}, {found.engine}")]
    if row is not None:
        between = f"{row.low:,} to {row.high:,}"
        cards.append(("fastest batch here", f"{row.batch_size:,}", between))
        factor = advice.lr_factor(row.batch_size)
        cards.append(("learning rate", f"x {factor:.3g}", "for the fastest batch"))
    interval = f"90 %: {number(trend.low)} to {number(trend.high)}"
    cards.append(("noise scale", number(trend.noise_scale), interval))
    yield '<div class="cards">'
    for name, value, note in cards:
        parts = (("note", name), ("value", value), ("note", note))
        yield "<div>" + "".join(f'<p class="{c}">{escape(x)}</p>' for c, x in parts) + "</div>"
    yield "</div>"


def _noise_chart(advice: BatchAdvice) -> str:
    points = [
        ((segment.first + segment.last) / 2, segment.noise_scale)
        for segment in advice.trend.segments
        if 0 < segment.noise_scale < math.inf
    ]
    marks = [Mark("present batch", y=advice.found.batch_size)]
    return log_chart([Line("noise scale", points)], marks, x="optimizer step", y="samples")


def _time_chart(advice: BatchAdvice) -> str:
    row, present = advice.this_machine, advice.found.batch_size
    assert row is not None
    low, high = min(present, row.batch_size) / 8, max(present, row.batch_size) * 8
    sizes = [max(1.0, low) * (high / max(1.0, low)) ** (i / _CURVE) for i in range(_CURVE + 1)]
    points = [(size, advice.relative_time(size)) for size in sizes]
    marks = [Mark("present", x=present), Mark("fastest", x=row.batch_size)]
    return log_chart(
        [Line("time", points)], marks, x="batch size", y="time, present = 1", log_x=True
    )


def _devices_table(advice: BatchAdvice) -> str:
    table = _table(DEVICE_COLUMNS, map(device_cells, advice.devices))
    notes = (f'<p class="note">{escape(note)}</p>' for note in device_notes(advice))
    return "\n".join((table, *notes))


def _layers_table(advice: BatchAdvice) -> str:
    rows = [
        (layer.name or "the model itself", f"{layer.share:.0%}", number(layer.noise_scale))
        for layer in advice.trend.layers[:10]
    ]
    return _table(("layer", "share of the noise", "its own noise scale"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _lines(advice: BatchAdvice) -> Iterator[str]:
    found = lines_to_add(advice)
    if found:
        yield "<h2>Lines to add</h2>"
    for lines in found:
        yield f"<h3>{escape(lines.trainer)}</h3>\n<pre>{escape(lines.lines)}</pre>"
