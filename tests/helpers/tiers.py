"""Which command runs a test: `make test`, `make test-all` or `make test-release`.

A test function without parameters is run by the first. Of a function with several lists of
parameters the first command runs every value once, the second every pair of values of two lists,
and the third the whole product. A test on ranks costs a hundred times as much and comes one command
later: one case in the first, every value in the second, the product in the third. The mark `early`
treats it as any other test, and the mark `late` treats any other test as one on ranks. The marks
`thorough` and `release` move a test, or one of its parameters, to the second or the third command.
"""

from collections import defaultdict
from itertools import combinations

THOROUGH, RELEASE = "thorough", "release"


def is_on_ranks(item) -> bool:
    """Whether a test starts processes; others have a parameter named `ranks`."""
    return "ranks" in item.fixturenames and "ranks" not in _params(item)


def is_on_deepspeed(item) -> bool:
    """Whether a test needs the operations that DeepSpeed compiles."""
    return "deepspeed_ranks" in item.fixturenames or bool(item.get_closest_marker("deepspeed"))


def mark_products(items) -> None:
    """Marks the cases that only a later command runs, function by function."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        late = _is_late(cases[0])
        in_all = [case for case in cases if not case.get_closest_marker(RELEASE)]
        first = [case for case in in_all if not case.get_closest_marker(THOROUGH)]
        first = _cover(first, together=0 if late else 1)
        second = _cover(in_all, together=1 if late else 2, begun=first)
        for case in in_all:
            if case not in second:
                case.add_marker(RELEASE)
            elif case not in first:
                case.add_marker(THOROUGH)


def _is_late(item) -> bool:
    mark = item.get_closest_marker
    return bool(mark("late") or (is_on_ranks(item) and not mark("early")))


def _params(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _cover(cases, together, begun=()) -> list:
    """The first cases that together have every combination of values of `together` lists.

    Greedy: starts with the cases `begun`, and always adds the first that has most missing ones.
    """
    combinations_of = {case: set(_choices(case, together)) for case in cases}
    missing = set().union(*combinations_of.values())
    chosen = list(begun)
    for case in chosen:
        missing -= combinations_of[case]
    while missing:
        best = max(cases, key=lambda case: len(combinations_of[case] & missing))
        missing -= combinations_of[best]
        chosen.append(best)
    return chosen


def _choices(case, together):
    """The combinations of a case's values of `together` lists."""
    params = _params(case)
    lists = [_names(mark.args[0]) for mark in case.iter_markers("parametrize")]
    lists += [(name,) for name in params.keys() - set().union(*lists)]  # parameters of fixtures
    values = [(names, *(id(params[name]) for name in names)) for names in lists]
    return combinations(values, min(together, len(values)))


def _names(argument) -> tuple[str, ...]:
    parts = argument.split(",") if isinstance(argument, str) else argument
    return tuple(part.strip() for part in parts)
