"""Does the batch that follows the measurements pay, and against what?

docs/results/batch-sizes.md has the hypotheses and the rule, which were written before the runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from bigbatch_recipes.sweep_results import SweepPoint, SweepResults
from studies.results.comparison import Arms, Comparison
from studies.results.step_cost import StepCost

DEVICES = (1, 8, 64)
DOUBLING, NOISE_SCALE = "doubling", "noise scale"
CONTROLLED = ("SimiGrad .1", "SimiGrad .2", "SimiGrad .4", NOISE_SCALE, "Goodput, 8 devices")
_WARMED_FROM = 256  # batches that a longer warm-up is tried for

UNMEASURED = {"every": 1000}  # measuring would only take time
MEASURED = {"groups": 8, "smoothing": "auto", "max_change": "auto"}
_ONE_SIZE = {"smoothing": "auto", "max_change": "auto"}  # micro-batches are compared
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


def _arms(doubling_samples: int, cost: StepCost) -> Arms:
    """Fixed batches, a schedule with doublings after so many samples, policies that measure."""
    arms = _scheduled((64, 128, 256, 512, 1024), doubling_samples)
    for tenths in (1, 2, 4):
        arms |= _simigrad(tenths, MEASURED)
    single = {"smoothing": None, "max_change": None}  # as in the paper
    arms["SimiGrad .2, single steps"] = {**arms["SimiGrad .2"], **single}
    arms |= _noise_scale(MEASURED)
    for devices in DEVICES:
        arms |= _goodput(cost, devices, MEASURED)
    return arms


def _one_size_arms(cost: StepCost) -> Arms:
    """Arms of a network with BatchNorm, whose micro-batches are all alike."""
    return {
        **_scheduled((64, 128, 256, 512), 4_000),
        **_simigrad(2, _ONE_SIZE),
        **_noise_scale(_ONE_SIZE),
        **_goodput(cost, 8, _ONE_SIZE),
    }


def _scheduled(sizes: Sequence[int], doubling_samples: int) -> dict[str, dict[str, Any]]:
    """Arms that measure nothing: fixed batches, with a long warm-up too if large, and doublings."""
    arms: dict[str, dict[str, Any]] = {}
    for size in sizes:
        arms[fixed(size)] = {"policy": "fixed", "batch_size": size, **UNMEASURED}
        if size >= _WARMED_FROM:
            long = {"lr_schedule": "warm-up 1 epoch; cosine"}
            arms[f"{fixed(size)}, warm-up 1 epoch"] = {**arms[fixed(size)], **long}
    batches = f"{sizes[0]}, x2 every {doubling_samples} samples up to {sizes[-1]}"
    arms[DOUBLING] = {"policy": "schedule", "batch_schedule": batches, **UNMEASURED}
    return arms


def _noise_scale(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {NOISE_SCALE: {"policy": "noise-scale", **measured, "smoothing": "16 steps"}}


def _simigrad(tenths: int, measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"SimiGrad .{tenths}": {"policy": "simigrad", "target": tenths / 10, **measured}}


def _goodput(
    cost: StepCost, devices: int, measured: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    overhead = round(cost.overhead(devices), 1)
    name = f"Goodput, {devices_text(devices)}"
    return {name: {"policy": "goodput", "overhead": overhead, **measured}}


def devices_text(count: int) -> str:
    """A number of devices in words."""
    return f"{count} device" + "s" * (count > 1)


def fixed(size: int) -> str:
    """Name of the arm with a fixed batch."""
    return f"fixed {size}"


def replay_of(arm: str) -> str:
    """Name of the arm that replays the mean trajectory of another."""
    return f"replay of {arm}"


def equal_steps(arm: str) -> str:
    """Name of the fixed batch with as many steps as another arm."""
    return f"fixed, steps of {arm}"


def _controls(arms: Sequence[str], results: SweepResults) -> Arms:
    """Two controls for each of these arms: the replay of the other seeds, and a fixed batch."""
    complete = _complete_points(results, arms)
    controls: dict[str, dict[str, Any]] = {}
    for arm, point in complete.items():
        runs = str(results.path.resolve() / f"{point.name}-seed[0-9]")
        replay = {"policy": "schedule", "replay_from": runs}
        controls[replay_of(arm)] = {**replay, **UNMEASURED}
    for arm, point in complete.items():
        size = round(point.average_batch)
        controls[equal_steps(arm)] = {"policy": "fixed", "batch_size": size, **UNMEASURED}
    return controls


def _complete_points(results: SweepResults, arms: Iterable[str]) -> dict[str, SweepPoint]:
    """Points of those arms of which no run failed: others have no control until all are trained."""
    points = {str(point.values["arm"]): point for point in results.shown}
    return {arm: points[arm] for arm in arms if len(points[arm].runs) == len(points[arm].seeds)}


COMPARISONS = (
    Comparison(
        name="batch-mlp",
        recipe="fashion-mnist",
        settings=MLP,
        arms=partial(_arms, 12_000),
        rates=(0.0125, 0.025, 0.05, 0.1, 0.2),
        seeds=8,
        tune_seeds=2,
        controls=partial(_controls, CONTROLLED),
    ),
    Comparison(
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
        arms=partial(_arms, 6_000),
        rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        seeds=8,
        tune_seeds=2,
        controls=partial(_controls, CONTROLLED),
    ),
    Comparison(  # BatchNorm sees 16 images at a time in every arm: arms differ in the batch alone
        name="batch-cifar10",
        recipe="cifar10-resnet18",
        settings={
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
        },
        arms=_one_size_arms,
        rates=(0.02, 0.04, 0.08, 0.16),
        seeds=8,
        tune_seeds=1,
        controls=partial(_controls, ("SimiGrad .2", NOISE_SCALE, "Goodput, 8 devices")),
    ),
)
