"""Random states: read fast, and right whatever was drawn in between."""

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.data.rng_state import RandomReader, restorable, restore_random_state
from bigbatch.errors import SettingError
from property_tests import property_test

DRAWS = {
    "python": random.random,
    "normal of python": lambda: random.gauss(0, 1),
    "numpy": numpy.random.rand,
    "normal of numpy": numpy.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "none": lambda: None,
}


def draw_all():
    return [draw() for draw in DRAWS.values() for _ in range(3)]


def are_equal(one, two):
    python = (
        torch.equal(one["python"][1], two["python"][1]) and one["python"][2] == two["python"][2]
    )
    words, *rest = zip(one["numpy"], two["numpy"], strict=True)
    numbers = torch.equal(*words) and all(a == b for a, b in rest)
    return python and numbers and torch.equal(one["torch"], two["torch"])


@property_test(60)
@given(st.lists(st.sampled_from([*DRAWS]), max_size=12), st.integers(0, 3))
def test_every_state_that_was_read_brings_the_same_numbers_again(kinds, seed):
    numpy.random.seed(seed)  # noqa: NPY002
    reader, states, expected = RandomReader(), [], []
    for kind in kinds:
        states.append(restorable(reader.read()))
        DRAWS[kind]()
    for state in states:
        restore_random_state(state)
        expected.append(draw_all())
    for state, numbers in zip(states, expected, strict=True):
        restore_random_state(state)
        assert numbers == draw_all()
    for kind, one, two in zip(kinds, states, states[1:], strict=False):
        assert are_equal(one, two) == (kind == "none")


def test_a_state_read_after_a_kept_normal_number_was_drawn_is_another_one():
    numpy.random.seed(0)  # noqa: NPY002
    random.seed(0)
    reader = RandomReader()
    for draw in (numpy.random.randn, lambda: random.gauss(0, 1)):
        draw()  # draws two and keeps one
        before = reader.read()
        draw()  # gives the one that was kept: no word is drawn
        after = reader.read()
        assert (before["numpy"][1] == after["numpy"][1]).all()
        assert before["python"][1] == after["python"][1]
        assert (before["numpy"][3], before["python"][2]) != (after["numpy"][3], after["python"][2])


def test_numpys_generator_is_asked_only_when_it_has_moved():
    reader = RandomReader()
    numpy.random.seed(1)  # noqa: NPY002
    first = reader.read()["numpy"]
    assert reader.read()["numpy"] is first
    numpy.random.rand()  # noqa: NPY002
    assert reader.read()["numpy"] is not first


def test_pythons_generator_is_asked_only_when_it_has_moved():
    reader = RandomReader()
    random.seed(1)
    first = reader.read()["python"]
    assert reader.read()["python"] is first
    random.random()
    assert reader.read()["python"] is not first


def test_a_wrapped_or_replaced_generator_of_python_is_read_as_it_is(monkeypatch):
    reader, other, module_wide = RandomReader(), random.Random(7), random.getstate
    reader.read()
    monkeypatch.setattr(random, "getstate", lambda: module_wide())  # as a profiler may wrap it
    for _ in range(2):
        assert reader.read()["python"] == random.getstate()
        random.random()
    monkeypatch.setattr(random, "getstate", other.getstate)
    for _ in range(2):
        assert reader.read()["python"] == other.getstate()
        other.random()


def test_a_state_is_another_one_where_the_position_is_the_same_again():
    reader = RandomReader()
    random.seed(2)
    numpy.random.seed(2)  # noqa: NPY002
    random.getrandbits(32)
    numpy.random.random_sample()  # noqa: NPY002
    first = reader.read()
    for _ in range(624):
        random.getrandbits(32)
        numpy.random.bytes(4)  # noqa: NPY002
    second = reader.read()
    assert first["python"][1][-1] == second["python"][1][-1]
    assert first["numpy"][2] == second["numpy"][2]
    assert first["python"] != second["python"] == random.getstate()
    assert (first["numpy"][1] != second["numpy"][1]).any()


def test_a_read_state_does_not_move_with_the_generator():
    reader = RandomReader()
    states = [reader.read(), reader.read()]
    numbers = numpy.random.rand(5).tolist()  # noqa: NPY002
    for state in states:
        restore_random_state(restorable(state))
        assert pytest.approx(numbers) == numpy.random.rand(5).tolist()  # noqa: NPY002


def test_a_generator_of_numpy_that_cannot_be_saved_is_refused_by_name():
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(0))
    try:
        with pytest.raises(SettingError, match=r"PCG64.*MT19937"):
            RandomReader().read()
    finally:
        numpy.random.set_bit_generator(usual)
