"""Charts are well-formed SVG that shows what it is given, in classes that have a theme."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.chart_axis import Axis
from bigbatch.log.chart_svg import stylesheet, svg, swatch
from bigbatch.log.series_style import NEUTRAL, style_of
from property_tests import property_test

XS = [1.0, 2.0, 3.0, 4.0]


def drawn(chart, **options):
    return ElementTree.fromstring(svg([chart], **options))


def parts(element, css):
    return [one for one in element.iter() if css in one.get("class", "").split()]


def positions(line):
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def values(element, line):
    """Values at a line's points, as the script of a page reads them."""
    found = []
    for position in positions(line):
        point = []
        for axis, at in zip("xy", position, strict=True):
            low, high, start, end = map(float, element.get(f"data-{axis}").split())
            share = (at - start) / (end - start)
            is_log = axis in element.get("data-log")
            point.append(low * (high / low) ** share if is_log else low + (high - low) * share)
        found.append(pytest.approx(tuple(point), rel=0.01, abs=0.02))
    return found


@pytest.mark.parametrize("log", [None, 2, 10])
def test_a_line_shows_its_points_on_linear_and_logarithmic_axes(log):
    ys = [8.0, 1.0, 500.0, 60.0]
    element = drawn(Panel("loss", "samples", [Series("SGD", XS, ys)], x_log=log, y_log=log))
    (line,) = parts(element, "line")
    assert values(element, line) == [*zip(XS, ys, strict=True)]


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_a_gap(missing):
    element = drawn(Panel("loss", "samples", [Series("SGD", XS, [1, missing, 2, 3])]))
    first, second = parts(element, "line")
    assert len(set(positions(first))) == 1
    assert len(positions(second)) == 2


def test_a_logarithmic_axis_leaves_out_what_is_not_positive():
    element = drawn(Panel("loss", "samples", [Series("SGD", XS, [0, -1, 2, 3])], y_log=10))
    assert [len(positions(line)) for line in parts(element, "line")] == [2]


def test_a_step_holds_the_value_of_a_point_back_to_the_point_before():
    element = drawn(Panel("batch", "samples", [Series("SGD", XS[:3], [8, 16, 4], kind="step")]))
    (line,) = parts(element, "line")
    assert values(element, line) == [(1, 8), (1, 16), (2, 16), (2, 4), (3, 4)]


def test_a_band_ends_where_one_of_its_ends_is_infinite():
    series = Series("SGD", XS, [1, 2, 3, 4], low=[0, 1, 2, 3], high=[2, math.inf, 4, 5])
    (band,) = parts(drawn(Panel("loss", "samples", [series])), "band")
    assert band.get("d").count("M") == 2


def test_points_have_error_bars_markers_and_notes():
    series = Series(
        "SGD", XS[:2], [1, 2], low=[0, 1], high=[2, 3], kind="points", hollow=[False, True],
        notes=["first", "second <3"],
    )  # fmt: skip
    element = drawn(Panel("score", "batch", [series]))
    assert len(parts(element, "whisker")) == len(parts(element, "marker")) == 2
    assert len(parts(element, "hollow")) == 1
    assert [note.text for note in element.iter("title")] == ["first", "second <3"]
    assert parts(element, "line") == []


def test_categories_are_named_from_top_to_bottom_and_points_lie_at_their_height():
    series = Series("arms", [0.5, -0.5], [0, 1], x_low=[0, -1], x_high=[1, 0], kind="points")
    element = drawn(Panel("gain", "points", [series], y_names=["one", "two"]))
    heights = {text.text: float(text.get("y")) for text in element.iter("text")}
    assert heights["one"] < heights["two"]
    tops = [float(bar.get("y1")) for bar in parts(element, "whisker")]
    assert tops == pytest.approx([heights["one"], heights["two"]], abs=6)


def test_a_mark_has_its_name_above_its_line():
    series = [Series("a < b", XS, XS)]
    element = drawn(Panel("similarity", "samples", series, marks=[Mark("target 2", y=2.0)]))
    (line,) = parts(element, "mark")
    (name,) = [text for text in element.iter("text") if text.text == "target 2"]
    assert float(name.get("y")) == pytest.approx(float(line.get("y1")) - 4)


def test_a_series_has_one_style_in_all_panels_and_in_the_key():
    panels = [
        Panel("loss", "samples", [Series("a", XS, XS), Series("b", XS, XS)]),
        Panel("score", "samples", [Series("b", XS, XS)]),
    ]
    element = ElementTree.fromstring(svg(panels, key=True))
    assert [one.get("data-series") for one in parts(element, "series")] == ["0", "1", "1"]
    assert [text.text for text in element.iter("text")][:2] == ["a", "b"]
    assert len(parts(element, "c1")) == 3


def test_points_outside_the_range_lie_at_the_edge():
    element = drawn(Panel("loss", "samples", [Series("a", XS, [1, 50, 2, 3])], y_range=(0, 5)))
    (line,) = parts(element, "line")
    assert values(element, line) == [(1, 1), (2, 5), (3, 2), (4, 3)]


def test_a_file_of_its_own_has_the_style_and_both_themes():
    text = svg([Panel("loss", "samples", [Series("a", XS, XS)])], standalone=True)
    element = ElementTree.fromstring(text)
    (style,) = element.iter("{http://www.w3.org/2000/svg}style")
    assert style.text == stylesheet()
    assert "prefers-color-scheme: dark" in stylesheet()


@pytest.mark.parametrize("number", [NEUTRAL, *range(42)])
def test_each_class_of_a_style_is_in_the_style_sheet(number):
    style = style_of(number)
    assert f".{style.color} {{ --own" in stylesheet()
    assert style.dash == "d0" or f".{style.dash} {{ stroke-dasharray" in stylesheet()
    ElementTree.fromstring(swatch(number))


def test_forty_two_styles_differ():
    assert len({(style.color, style.dash) for style in map(style_of, range(42))}) == 42


def _luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_are_readable_on_their_page(theme):
    """WCAG 2.1 asks for a contrast of 4.5."""
    pages = re.findall(r"--page: (#\w+)", stylesheet())
    page = _luminance(pages[theme])
    colors = re.findall(r"--(?:c\d|text|soft): (#\w+)", stylesheet())
    half = len(colors) // 2
    for color in colors[theme * half : (theme + 1) * half]:
        low, high = sorted((page, _luminance(color)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("xs", "ys"),
    [
        ([1], [1.0]),
        ([1, 2], [1e-9, 1e9]),
        ([0.5, 0.5], [5.0, 5.0]),
        (range(1, 2000), range(2, 2001)),
        ([], []),
    ],
)
@pytest.mark.parametrize("log_x", [None, 10])
def test_a_chart_stays_within_its_frame(xs, ys, log_x):
    marks = [Mark("<here>", x=3.0), Mark("present", y=2.0)]
    panel = Panel("a & b", "x", [Series("a", xs, ys)], x_log=log_x, y_log=10, marks=marks)
    element = drawn(panel)
    assert "<here>" in [text.text for text in element.iter("text")]
    for one in element.iter():
        assert all(0 <= float(one.get(name, 0)) <= 400 for name in ("x1", "x2", "x"))
        assert all(0 <= float(one.get(name, 0)) <= 250 for name in ("y1", "y2", "y"))
    assert len(parts(element, "grid")) <= 7


@property_test(200)
@given(st.floats(1e-6, 1e6), st.floats(0, 1e6), st.sampled_from([None, 2, 10]), st.integers(2, 8))
def test_an_axis_has_few_ticks_within_its_ends(low, span, base, most):
    axis = Axis(low, low + span, 0.0, 100.0, log_base=base)
    ticks = axis.ticks(most)
    assert 1 <= len(ticks) <= most
    assert all(low * (1 - 1e-9) <= tick <= (low + span) * (1 + 1e-9) for tick in ticks)
    assert sorted(ticks) == ticks
