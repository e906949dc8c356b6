"""Which of the three commands runs a test: `make test`, `make test-all`, `make test-release`.

A test function without parameters is in the first. Of a function over several lists of parameters
the first command runs every value of every list once, the second every pair of values of two lists
once, and the third the whole product. A test on ranks costs a hundred times as much and comes one
command later: one case of it, every value, the product; the mark `early` treats it as any other,
and the mark `late` any other as it. The marks `thorough` and `release` move a test, or one of its
parameters, to the second or the third command.
"""

from collections import defaultdict
from itertools import combinations

THOROUGH, RELEASE = "thorough", "release"


def is_on_ranks(item) -> bool:
    """Whether a test asks for processes; some have a parameter of that name."""
    return "ranks" in item.fixturenames and "ranks" not in _params(item)


def is_on_deepspeed(item) -> bool:
    """Whether a test runs what DeepSpeed compiles."""
    return "deepspeed_ranks" in item.fixturenames or bool(item.get_closest_marker("deepspeed"))


def mark_products(items) -> None:
    """Marks what only a later command runs, function by function."""
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
    said = item.get_closest_marker
    return bool(said("late") or (is_on_ranks(item) and not said("early")))


def _params(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _cover(cases, together, begun=()) -> list:
    """Cases, in their order, that hold all that `together` lists at a time can be among all cases.

    Greedy: always the first of those that add most to `begun`.
    """
    held = {case: set(_choices(case, together)) for case in cases}
    missing = set().union(*held.values())
    chosen = list(begun)
    for case in chosen:
        missing -= held[case]
    while missing:
        best = max(cases, key=lambda case: len(held[case] & missing))
        missing -= held[best]
        chosen.append(best)
    return chosen


def _choices(case, together):
    """What a case takes from each list; from `together` lists at a time."""
    params = _params(case)
    lists = [_names(mark.args[0]) for mark in case.iter_markers("parametrize")]
    lists += [(name,) for name in params.keys() - set().union(*lists)]  # parameters of fixtures
    taken = [(names, *(id(params[name]) for name in names)) for names in lists]
    return combinations(taken, min(together, len(taken)))


def _names(argument) -> tuple[str, ...]:
    parts = argument.split(",") if isinstance(argument, str) else argument
    return tuple(part.strip() for part in parts)
