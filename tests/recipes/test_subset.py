"""Which samples a training uses, and which of them show what it has learnt."""

import pytest

from bigbatch_recipes.datasets.in_memory import chosen_indices, scored_indices


def test_fewer_are_always_among_more():
    order = list(chosen_indices(1_000, 600))
    assert list(chosen_indices(1_000, 200)) == order[:200]
    assert 600 == len(set(order)) == len(set(order) & set(range(1_000)))


def test_all_are_used_where_none_or_too_many_are_asked_for():
    assert [range(5)] * 3 == [chosen_indices(5, 0), chosen_indices(5, 5), chosen_indices(5, 9)]


def test_an_index_takes_four_bytes():
    assert 4 * 100 == memoryview(chosen_indices(200, 100)).nbytes  # a list of as many has 40 each


@pytest.mark.parametrize("samples", [0, 4_000, 50])
def test_some_are_trained_on_and_lie_anywhere(samples):
    some = list(scored_indices(10_000, samples, 100))
    assert len(set(some)) == len(some) == min(samples or 100, 100)
    assert set(some) <= set(chosen_indices(10_000, samples))
    assert max(some) > 8_000  # not the first ones, which in a file by class are of one class
