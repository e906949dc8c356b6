"""Operations, host waits and copies of a step on the simulated device are these numbers."""

import pytest

from studies import launches

pytestmark = pytest.mark.early

# operations, host waits, copies to the device, copies to the host; `python -m studies.launches`
# prints them, and `--names` the operations. A change that lowers one writes the new number here.
COUNTS = {
    "plain SGD": (367, 0, 8, 0),
    "plain SGD, k = 1": (73, 0, 2, 0),
    "plain SGD, k = 8": (759, 0, 16, 0),
    "AdaptiveBatch, not measured": (377, 5, 8, 5),
    "AdaptiveBatch, not measured, k = 1": (73, 1, 2, 1),
    "the same, fused SGD": (74, 1, 2, 1),
    "AdaptiveBatch, cut, measured": (335, 5, 9, 5),
    "AdaptiveBatch, 8 groups, measured": (167, 2, 4, 2),
    "GradientMeter": (327, 1, 9, 1),
    "VR-SGD": (643, 0, 16, 0),
    "VR-Momentum": (699, 0, 16, 0),
    "VR-Adam": (815, 0, 16, 0),
    "VR-LARS": (670, 0, 16, 0),
    "VR-LAMB": (699, 0, 16, 0),
}


@pytest.fixture(scope="module")
def counted(on_simulated_device):
    return on_simulated_device(count_all)


def count_all(rank, ranks):
    return {name: launches.counts(case) for name, case in launches.CASES.items()}


@pytest.mark.parametrize("name", COUNTS)
def test_a_step_has_these_counts(name, counted):
    found = counted[name]
    copies = found.copies["to device"], found.copies["to host"]
    assert COUNTS[name] == (found.operations.total(), found.waits.total(), *copies)


def test_every_case_is_counted(counted):
    assert list(COUNTS) == list(counted)


def test_the_optimizer_of_a_plain_step_is_three_operations_for_all_parameters(counted):
    operations = counted["plain SGD, k = 1"].operations
    assert (1, 2) == (operations["_foreach_mul_"], operations["_foreach_add_"])  # momentum, step


def test_a_plain_step_has_as_many_more_operations_as_it_has_backwards(counted):
    one, four, eight = (
        counted[name].operations.total()
        for name in ("plain SGD, k = 1", "plain SGD", "plain SGD, k = 8")
    )
    assert (four - one) * 7 == (eight - one) * 3
