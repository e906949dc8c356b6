"""Values with another one at a place within them, as a damaged file has."""

import copy
import math

from hypothesis import HealthCheck
from hypothesis import strategies as st

from bigbatch.errors import RunError

ODD = st.sampled_from(
    ["", "8", "nan", None, True, False, -1, 0, 1.5, 10**30, 10**400, 1e308, math.nan, math.inf]
)
JSON = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some, max_size=3)
    ),
    max_leaves=4,
)
# the folder is made once for all examples, and each writes its file again
FUZZED = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def places_in(value, path=()):
    """The way to every value within a value."""
    yield path
    if isinstance(value, (dict, list)):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places_in(value[key], (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def damaged(value):
    """The value with another one at a place within it, or without what is there."""
    places = st.sampled_from(list(places_in(value))[1:])
    return st.builds(lambda path, new: (replaced(value, path, new), path), places, JSON)


def or_said(read):
    """What is read, and what is said instead."""
    try:
        return read(), None
    except RunError as error:
        return None, str(error)
