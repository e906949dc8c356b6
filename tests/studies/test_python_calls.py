"""A step calls at most so many functions, of Python's and C's, and enters so few of the library."""

import pytest

from studies import python_calls

# beyond a plain step, functions of the library, its files; `python -m studies.python_calls` prints
# them, 1 to 3 % less. A change that lowers one writes the new number here; later releases of Python
# call fewer.
MOST = {
    "not measured": (204, 130, 34),
    "8 groups, every step": (905, 290, 48),
    "cut, every step": (1560, 242, 44),
    "VR-SGD": (580, 118, 19),
    "GradientMeter": (1890, 137, 16),
}


@pytest.fixture(scope="module")
def counted():
    found = python_calls.rows(tiny=False)
    return {row["step"]: row for row in found if row["step"] != "plain"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", MOST)
def test_a_step_calls_at_most(step, counted):
    keys = "beyond plain", "functions of the library", "its files"
    for key, most in zip(keys, MOST[step], strict=True):
        assert int(counted[step][key]) <= most, key
