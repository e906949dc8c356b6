"""Tests of properties by hypothesis: fewer examples in the first of the three commands."""

from hypothesis import settings

FEWER = 5  # times, where conftest finds that the first command runs
_share = 1


def try_fewer() -> None:
    """Of each property that is defined from now on."""
    global _share
    _share = FEWER


def property_test(examples: int, **options):
    """The same examples in every run; at least five."""
    examples = max(min(examples, 5), examples // _share)
    return settings(deadline=None, derandomize=True, max_examples=examples, **options)
