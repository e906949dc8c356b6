"""Settings of all experiments in the VRGD paper.

Source: Jiang et al., arXiv 2309.13681, equation 9 and section 4.1.
"""

from bigbatch_recipes.recipe import Rows

VRGD = "VRGD"
CLIPS: Rows = {"gamma": (0.1, VRGD), "r_max": (1.0, f"{VRGD}, equation 9")}
REPEATS = (5, f"{VRGD}: each test five times")
MEDIAN = (3, f"{VRGD}: the median of three")
BY_MEDIAN: Rows = {"over_seeds": ("median", MEDIAN[1])}
TO_TEN = (10.0, f"{VRGD}, 1 / gamma")  # the upper clip by the paper's text
