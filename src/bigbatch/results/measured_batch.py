"""Does the batch that follows the measurements pay, and against what?"""

from typing import Any

from bigbatch.results.comparison import Arms, Comparison
from bigbatch.results.step_cost import StepCost
from bigbatch.runs.sweep_results import SweepResults

DEVICES = (1, 8, 64)
FIXED = (64, 128, 256, 512, 1024)
_WARMED_FROM = 256  # batches that a longer warm-up is tried for
BASE = "fixed 64"
DOUBLING = "doubling"
CONTROLLED = ("SimiGrad .1", "SimiGrad .2", "SimiGrad .4", "noise scale", "Goodput, 8 devices")

HYPOTHESES = """\
1. At equal samples no adaptive arm differs in its last score from the open-loop replay of its own
   mean trajectory: what is measured at a step adds nothing beyond the shape.
2. On 8 and 64 devices the best adaptive arm reaches the target in less modelled time than the
   best fixed batch; on 1 device it does not.
3. The doubling schedule is as fast as the best adaptive arm.
"""
RULE = """\
"Above", "below", "faster" and "slower" are said where the paired 95 % interval over 8 fresh seeds
excludes 0 (of the score's difference, or of the logarithm of the time ratio); else the two are not
distinguished. Each arm has the rate that was best on held-out training samples with 2 other seeds,
of one grid for all. The target is the mean held-out score of fixed 64 at its rate, less one point
of accuracy (plus 0.05 bits). Fixed batches are represented by the one that is fastest in
hindsight, which favours them. A run that does not reach the target is counted, not averaged.
"""

UNMEASURED = {"every": 1000}  # measuring would only take time
MEASURED = {"groups": 8, "smoothing": "auto", "max_change": "auto"}
MLP = {  # changes of the recipe fashion-mnist
    "network": "mlp",
    "samples": 20_000,
    "epochs": 3,
    "held_out": 5_000,
    "batch_size": 64,
    "base_batch": 64,
    "micro_batch": 2048,
    "virtual_ranks": 1,
    "min_batch": 32,
    "max_batch": 2048,
    "evaluate_every": "2K samples",
}
_LONG_WARMUP = {"lr_schedule": "warm-up 1 epoch; cosine"}


def _arms(doubling_samples: int, cost: StepCost) -> Arms:
    """Fixed batches, a schedule, and policies that measure.

    Args:
        doubling_samples: samples between two doublings of the schedule.
        cost: step time that Goodput is given.
    """
    arms: dict[str, dict[str, Any]] = {}
    for size in FIXED:
        arms[fixed(size)] = {"policy": "fixed", "batch_size": size, **UNMEASURED}
        if size >= _WARMED_FROM:
            arms[fixed(size, long_warmup=True)] = {**arms[fixed(size)], **_LONG_WARMUP}
    arms[DOUBLING] = {
        "policy": "schedule",
        "batch_schedule": f"64, x2 every {doubling_samples} samples up to 1024",
        **UNMEASURED,
    }
    for target in (0.1, 0.2, 0.4):
        arms[f"SimiGrad .{target * 10:.0f}"] = {"policy": "simigrad", "target": target, **MEASURED}
    single = {"smoothing": None, "max_change": None}  # as in the paper
    arms["SimiGrad .2, single steps"] = {**arms["SimiGrad .2"], **single}
    noise = {"policy": "noise-scale", **MEASURED, "smoothing": "16 steps"}
    arms["noise scale"] = noise
    arms["noise scale, branch tests"] = {**noise, "branch_test": "100 %", "branch_share": 3.0}
    for devices in DEVICES:
        arms[f"Goodput, {devices} device{'s' * (devices > 1)}"] = {
            "policy": "goodput",
            "overhead": round(cost.overhead(devices), 1),
            **MEASURED,
        }
    return arms


def _controls(results: SweepResults) -> Arms:
    """Two controls for the adaptive arms: the replay of the other seeds, and a fixed batch.

    An arm with a run that failed has none until that run is trained.
    """
    points = {str(point.values["arm"]): point for point in results.shown}
    controls: dict[str, dict[str, Any]] = {}
    for arm in CONTROLLED:
        point = points[arm]
        if len(point.runs) < point.planned:
            continue
        controls[replay_of(arm)] = {
            "policy": "schedule",
            "replay_from": str(results.path.resolve() / f"{point.name}-seed[0-9]"),
            **UNMEASURED,
        }
        controls[equal_steps(arm)] = {
            "policy": "fixed",
            "batch_size": round(point.average_batch),
            **UNMEASURED,
        }
    return controls


def fixed(size: int, *, long_warmup: bool = False) -> str:
    """Name of the arm with a fixed batch."""
    return f"fixed {size}" + ", warm-up 1 epoch" * long_warmup


def replay_of(arm: str) -> str:
    """Name of the arm that replays the mean trajectory of another."""
    return f"replay of {arm}"


def equal_steps(arm: str) -> str:
    """Name of the fixed batch with as many steps as another arm."""
    return f"fixed, steps of {arm}"


def _comparison(doubling_samples: int, **values: Any) -> Comparison:
    return Comparison(
        arms=lambda cost: _arms(doubling_samples, cost),
        seeds=8,
        tune_seeds=2,
        controls=_controls,
        **values,
    )


COMPARISONS = (
    _comparison(
        12_000,
        name="batch-mlp",
        recipe="fashion-mnist",
        settings=MLP,
        rates=(0.0125, 0.025, 0.05, 0.1, 0.2),
    ),
    _comparison(
        6_000,
        name="batch-char-lm",
        recipe="char-lm",
        settings={
            "length": 32,
            "depth": 1,
            "heads": 2,
            "width": 32,
            "samples": 10_000,
            "epochs": 3,
            "batch_size": 64,
            "base_batch": 64,
            "micro_batch": 2048,
            "virtual_ranks": 1,
            "min_batch": 32,
            "max_batch": 2048,
            "evaluate_every": "2K samples",
            "held_out": 3_000,
            "lr_schedule": "warm-up 4K samples; cosine",
        },
        rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    ),
)
