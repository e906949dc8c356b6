"""Does the batch that follows the measurements pay, and against what?"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigbatch_recipes.sweep_results import SweepPoint, SweepResults
from studies.results.comparison import Arms, Comparison
from studies.results.step_cost import StepCost

DEVICES = (1, 8, 64)
FIXED = (64, 128, 256, 512, 1024)
_WARMED_FROM = 256  # batches that a longer warm-up is tried for
DOUBLING, NOISE_SCALE = "doubling", "noise scale"
CONTROLLED = ("SimiGrad .1", "SimiGrad .2", "SimiGrad .4", NOISE_SCALE, "Goodput, 8 devices")

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
_BATCHES = {
    "epochs": 3,
    "batch_size": 64,
    "base_batch": 64,
    "micro_batch": 2048,
    "virtual_ranks": 1,
    "min_batch": 32,
    "max_batch": 2048,
    "evaluate_every": "2K samples",
}
MLP = {"network": "mlp", "samples": 20_000, "held_out": 5_000, **_BATCHES}  # of fashion-mnist
_LONG_WARMUP = {"lr_schedule": "warm-up 1 epoch; cosine"}


def _arms(doubling_samples: int, cost: StepCost) -> Arms:
    """Fixed batches, a schedule, and policies that measure.

    Args:
        doubling_samples: samples between two doublings of the schedule.
        cost: step time that Goodput is given.
    """
    arms = scheduled(FIXED, doubling_samples)
    for tenths in (1, 2, 4):
        arms |= simigrad(tenths, MEASURED)
    single = {"smoothing": None, "max_change": None}  # as in the paper
    arms["SimiGrad .2, single steps"] = {**arms["SimiGrad .2"], **single}
    arms |= noise_scale(MEASURED)
    for devices in DEVICES:
        arms |= goodput(cost, devices, MEASURED)
    return arms


def scheduled(sizes: Sequence[int], doubling_samples: int) -> dict[str, dict[str, Any]]:
    """Arms that measure nothing: fixed batches, with a long warm-up too if large, and doublings."""
    arms: dict[str, dict[str, Any]] = {}
    for size in sizes:
        arms[fixed(size)] = {"policy": "fixed", "batch_size": size, **UNMEASURED}
        if size >= _WARMED_FROM:
            arms[fixed(size, long_warmup=True)] = {**arms[fixed(size)], **_LONG_WARMUP}
    batches = f"{sizes[0]}, x2 every {doubling_samples} samples up to {sizes[-1]}"
    arms[DOUBLING] = {"policy": "schedule", "batch_schedule": batches, **UNMEASURED}
    return arms


def noise_scale(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arm whose batch is the noise scale over a window in steps, by its name."""
    return {NOISE_SCALE: {"policy": "noise-scale", **measured, "smoothing": "16 steps"}}


def simigrad(tenths: int, measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arm that holds the similarity at so many tenths, by its name."""
    return {f"SimiGrad .{tenths}": {"policy": "simigrad", "target": tenths / 10, **measured}}


def goodput(cost: StepCost, devices: int, measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arm with the step time of so many devices, by its name."""
    overhead = round(cost.overhead(devices), 1)
    name = f"Goodput, {devices_text(devices)}"
    return {name: {"policy": "goodput", "overhead": overhead, **measured}}


def devices_text(count: int) -> str:
    """A number of devices in words."""
    return f"{count} device" + "s" * (count > 1)


def controls_of(results: SweepResults, arms: Sequence[str]) -> Arms:
    """Two controls for each of these arms: the replay of the other seeds, and a fixed batch."""
    controls = replay_controls(results, arms)
    for arm, point in _complete_points(results, arms).items():
        size = round(point.average_batch)
        controls[equal_steps(arm)] = {"policy": "fixed", "batch_size": size, **UNMEASURED}
    return controls


def replay_controls(results: SweepResults, arms: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Arms that replay the mean trajectory of other seeds."""
    return {
        replay_of(arm): {
            "policy": "schedule",
            "replay_from": str(results.path.resolve() / f"{point.name}-seed[0-9]"),
            **UNMEASURED,
        }
        for arm, point in _complete_points(results, arms).items()
    }


def _complete_points(results: SweepResults, arms: Iterable[str]) -> dict[str, SweepPoint]:
    """Points of those arms of which no run failed: others have no control until all are trained."""
    points = {str(point.values["arm"]): point for point in results.shown}
    return {arm: points[arm] for arm in arms if len(points[arm].runs) == points[arm].planned}


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
        controls=lambda results: controls_of(results, CONTROLLED),
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
            "held_out": 3_000,
            **_BATCHES,
            "lr_schedule": "warm-up 4K samples; cosine",
        },
        rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    ),
)
