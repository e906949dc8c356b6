"""Does an adaptive batch need no search, no warm-up, and no good first rate or batch?"""

from studies.results.comparison import Arms, Comparison
from studies.results.measured_batch import MEASURED, MLP, UNMEASURED
from studies.results.step_cost import StepCost

BATCHES = (32, 128, 512)
RATES = (0.005, 0.011, 0.023, 0.05, 0.11, 0.23, 0.5)
WARMUPS = {"with warm-up": "warm-up 0.2 epochs; cosine", "without": "cosine"}
POLICIES = {
    "fixed": {"policy": "fixed", **UNMEASURED},
    "SimiGrad .2": {"policy": "simigrad", "target": 0.2, **MEASURED},
    "SimiGrad .4": {"policy": "simigrad", "target": 0.4, **MEASURED},
    "noise scale": {"policy": "noise-scale", **MEASURED, "smoothing": "16 steps"},
}

HYPOTHESES = """\
1. Of all settings of first rate, first batch and warm-up, each adaptive policy reaches the target
   in a larger share than the fixed batch of the same settings.
2. Without warm-up the share of the adaptive policies falls by less than that of the fixed batch.
"""
RULE = """\
The rates span two decades (7), the first batches a factor of 16 (3), each with and without warm-up,
with 2 seeds. A training succeeds if its last test accuracy is at least the target of the comparison
`batch-mlp`; one that diverged fails. Two policies differ if the exact two-sided sign test on the
trainings of the same setting and seed in which one of them alone succeeds has p < .05.
"""


def arm_of(policy: str, batch: int, warmup: str) -> str:
    """Name of an arm."""
    return f"{policy}; {batch}; {warmup}"


def _arms(_: StepCost) -> Arms:
    return {
        arm_of(policy, batch, warmup): {**changes, "batch_size": batch, "lr_schedule": schedule}
        for policy, changes in POLICIES.items()
        for batch in BATCHES
        for warmup, schedule in WARMUPS.items()
    }


COMPARISON = Comparison(
    name="any-start",
    recipe="fashion-mnist",
    settings={**MLP, "held_out": 0, "evaluate_every": "20K samples"},
    arms=_arms,
    rates=RATES,
    seeds=2,
)
