"""Labels never overlap, and axes have a few ticks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.log.chart_axis import Axis, spread
from property_tests import property_test

PLACES = st.floats(-50, 350)


@property_test(200)
@given(st.lists(PLACES, max_size=20), st.floats(1, 30))
def test_labels_of_lines_are_a_gap_apart_in_the_order_of_the_lines(wanted, gap):
    places = spread(wanted, gap, 0.0, 250.0)
    if places is None:
        assert gap * (len(wanted) - 1) > 250
        return
    by_height = sorted(range(len(wanted)), key=places.__getitem__)
    assert all(0 <= place <= 250 + 1e-9 for place in places)
    for one, other in itertools.pairwise(by_height):
        assert places[other] - places[one] >= gap - 1e-9
        assert wanted[one] <= wanted[other]


@property_test(100)
@given(st.lists(st.integers(0, 20).map(lambda n: 12.0 * n), unique=True, max_size=15))
def test_labels_with_room_stay_at_their_lines(wanted):
    assert wanted == pytest.approx(spread(wanted, 12.0, 0.0, 250.0))


@property_test(100)
@given(st.lists(PLACES, min_size=2, max_size=8), st.floats(1, 20))
def test_no_other_places_are_nearer_to_the_lines(wanted, gap):
    """A move of touching labels together, which is the only free one, makes it no better."""
    places = spread(wanted, gap, -1e4, 1e4)
    order = sorted(range(len(wanted)), key=places.__getitem__)
    blocks = [[order[0]]]
    for one, other in itertools.pairwise(order):
        if places[other] - places[one] > gap + 1e-6:
            blocks.append([])
        blocks[-1].append(other)
    for block in blocks:
        assert sum(places[i] - wanted[i] for i in block) == pytest.approx(0, abs=1e-6)


@property_test(200)
@given(st.floats(1e-6, 1e6), st.floats(0, 1e6), st.sampled_from([None, 2, 10]), st.integers(2, 8))
def test_an_axis_has_few_ticks_within_its_ends(low, span, base, most):
    axis = Axis(low, low + span, 0.0, 100.0, log_base=base)
    ticks = axis.ticks(most)
    assert 1 <= len(ticks) <= most
    assert all(low * (1 - 1e-9) <= tick <= (low + span) * (1 + 1e-9) for tick in ticks)
    assert sorted(ticks) == ticks
