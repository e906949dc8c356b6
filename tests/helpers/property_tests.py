"""Property tests by hypothesis, with fewer examples in `make test`."""

from hypothesis import settings

FEWER = 5  # divides the examples, where conftest finds that `make test` runs
_divisor = 1


def try_fewer() -> None:
    """Reduces the examples of each property test that is defined later."""
    global _divisor
    _divisor = FEWER


def property_test(examples: int, **options):
    """Settings with the same examples in every run, at least five."""
    examples = max(min(examples, 5), examples // _divisor)
    return settings(deadline=None, derandomize=True, max_examples=examples, **options)
