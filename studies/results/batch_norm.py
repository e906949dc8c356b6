"""Does the measured batch pay on a network with BatchNorm, whose micro-batches are all alike?

A part of CIFAR-10 that a CPU trains in half a minute: what BatchNorm changes, not what large
trainings reach.
"""

from typing import Any

from studies.results.comparison import Arms, Comparison
from studies.results.measured_batch import (
    NOISE_SCALE,
    controls_of,
    goodput,
    noise_scale,
    scheduled,
    simigrad,
)
from studies.results.step_cost import StepCost

HYPOTHESES = """\
Those of `measured_batch`:
1. At equal samples no adaptive arm differs in its last score from the open-loop replay of its own
   mean trajectory.
2. On 8 and 64 devices the best adaptive arm reaches the target in less modelled time than the
   best fixed batch; on 1 device it does not.
3. The doubling schedule is as fast as the best adaptive arm.
"""
RULE = """\
That of `measured_batch`, with one seed for tuning. BatchNorm sees 16 images at a time in every arm,
so that arms differ in the batch alone, and micro-batches are compared: at least 4.
"""

_CONTROLLED = ("SimiGrad .2", NOISE_SCALE, "Goodput, 8 devices")
_MEASURED = {"smoothing": "auto", "max_change": "auto"}


def _arms(cost: StepCost) -> Arms:
    return {
        **scheduled((64, 128, 256, 512), 4_000),
        **simigrad(2, _MEASURED),
        **noise_scale(_MEASURED),
        **goodput(cost, 8, _MEASURED),
    }


_SETTINGS: dict[str, Any] = {
    "depth": 10,
    "width": 8,
    "samples": 8_000,
    "held_out": 2_000,
    "epochs": 2,
    "batch_size": 64,
    "base_batch": 64,
    "micro_batch": 16,
    "fixed_micro_batch": True,
    "virtual_ranks": 1,
    "min_batch": 64,
    "max_batch": 2048,
    "evaluate_every": "4K samples",
    "lr_schedule": "warm-up 2K samples; cosine",
}

COMPARISON = Comparison(
    name="batch-cifar10",
    recipe="cifar10-resnet18",
    settings=_SETTINGS,
    arms=_arms,
    rates=(0.02, 0.04, 0.08, 0.16),
    seeds=8,
    tune_seeds=1,
    controls=lambda results: controls_of(results, _CONTROLLED),
)
