"""Does the batch that follows the measurements pay in trainings that need a GPU?

Prepared, not run: docs/results/gpu.md. The arms that decide come first, as time may end.
"""

from collections.abc import Sequence
from typing import Any

from studies.results.comparison import Arms, Comparison
from studies.results.measured_batch import UNMEASURED, fixed, goodput, replay_controls, simigrad
from studies.results.step_cost import StepCost

HYPOTHESES = """\
1. At equal samples neither SimiGrad nor Goodput differs in its last score from the open-loop
   replay of its own mean trajectory.
2. On 8 and 64 devices like this one the best adaptive arm reaches the target in less modelled time
   than the best fixed batch; on 1 device it does not.
"""
RULE = """\
That of `measured_batch`, with 4 fresh seeds and one seed for tuning. The first arm, the smallest
fixed batch, sets the target. Results of fewer seeds are said to be of so many.
"""

_CONTROLLED = ("SimiGrad .2", "Goodput, 8 devices")
_MEASURED = {"smoothing": "auto", "max_change": "auto"}
_ON_GPU = {"device": "cuda", "precision": "bfloat16", "checkpoint_every": "1 epoch"}


def _arms(sizes: Sequence[int], measured: dict[str, Any], cost: StepCost) -> Arms:
    smallest, *larger = (
        (fixed(size), {"policy": "fixed", "batch_size": size, **UNMEASURED}) for size in sizes
    )
    adaptive: dict[str, dict[str, Any]] = {}
    for tenths in (2, 1):
        adaptive |= simigrad(tenths, measured)
    for devices in (8, 1):
        adaptive |= goodput(cost, devices, measured)
    return dict([smallest, *adaptive.items(), *larger])


def _comparison(sizes: Sequence[int], measured: dict[str, Any], **values: Any) -> Comparison:
    return Comparison(
        arms=lambda cost: _arms(sizes, {**_MEASURED, **measured}, cost),
        seeds=4,
        tune_seeds=1,
        controls=lambda results: replay_controls(results, _CONTROLLED),
        **values,
    )


COMPARISONS = (
    _comparison(
        (128, 256, 512, 1024, 2048),
        {},  # BatchNorm: micro-batches are compared, all of one size
        name="gpu-cifar10",
        recipe="cifar10-resnet18",
        settings={
            **_ON_GPU,
            "depth": 18,
            "width": 64,
            "samples": 0,
            "epochs": 10,
            "held_out": 5_000,
            "batch_size": 128,
            "base_batch": 128,
            "micro_batch": 32,
            "fixed_micro_batch": True,
            "virtual_ranks": 1,
            "min_batch": 128,
            "max_batch": 4096,
            "evaluate_every": "25K samples",
            "lr_schedule": "warm-up 1 epoch; cosine",
        },
        rates=(0.05, 0.1, 0.2),
        timed_sizes=(128, 512, 2048),
    ),
    _comparison(
        (32, 64, 128, 256, 512),
        {"groups": 8},
        name="gpu-gpt",
        recipe="char-lm",
        settings={
            **_ON_GPU,
            "length": 256,
            "depth": 12,
            "heads": 8,
            "width": 512,
            "dropout": 0.1,
            "samples": 0,
            "epochs": 6,
            "held_out": 500,
            "batch_size": 32,
            "base_batch": 32,
            "micro_batch": 64,
            "virtual_ranks": 1,
            "min_batch": 16,
            "max_batch": 1024,
            "evaluate_every": "2K samples",
            "lr_schedule": "warm-up 3K samples; cosine",
        },
        rates=(2.5e-4, 5e-4, 1e-3),
        timed_sizes=(16, 64, 128),
    ),
)
