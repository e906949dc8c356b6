"""A step leaves nothing behind: as many objects and bytes as a thousand steps before."""

import gc
import itertools
import tracemalloc

import pytest

from studies.long_run import LOOPS

# steps, after each of which sixty more are looked at; caches of small objects fill until about step
# 4,000: 68,772, 68,797 and 68,801 thousand bytes after 500, 2,500 and 4,500 steps with a meter
EARLY, LATER = 4000, 5000
OBJECTS = 10  # of interned numbers, caches and lists that have not seen their largest size
BYTES = 16_000  # of caches; a list that grows by one float a step takes 32,000


def largest(loop):
    """The most objects and bytes after twelve steps of sixty."""
    found = []
    for _ in range(12):
        next(itertools.islice(loop, 4, None))
        gc.collect()
        found.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))
    return [max(numbers) for numbers in zip(*found, strict=True)]


@pytest.mark.release
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_thousand_steps_leave_no_object_and_no_memory(name):
    loop = LOOPS[name]()
    tracemalloc.start()
    try:
        next(itertools.islice(loop, EARLY - 1, None))
        objects, traced = largest(loop)
        next(itertools.islice(loop, LATER - EARLY - 60 - 1, None))
        later_objects, later_traced = largest(loop)
    finally:
        tracemalloc.stop()
    assert later_objects <= objects + OBJECTS
    assert later_traced <= traced + BYTES
