"""Results of the sweep that judges an advised batch size, in memory and as JSON."""

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median_low, stdev
from typing import Any

import torch

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import write_atomically
from studies.target_training import TARGET, Result
from studies.timing import Times

FORMAT = "bigbatch bench advice"  # a key of the file


@dataclass(frozen=True)
class SizeResult:
    """All trainings of one batch size.

    Args:
        batch_size: samples of a step.
        rate: learning rate with the fewest steps; None where every rate failed.
        tuning: trainings that chose it.
        fresh: trainings at that rate, on other seeds.
    """

    batch_size: int
    rate: float | None
    tuning: list[Result]
    fresh: list[Result]

    @property
    def mean_steps(self) -> float:
        """Mean number of steps of the fresh seeds; infinite where a training failed."""
        if not self.fresh or self.failures:
            return math.inf
        return fmean(one.steps for one in self.fresh)

    @property
    def relative_error(self) -> float:
        """Standard error of the mean number of steps, over that mean; 0 of a single training."""
        if len(self.fresh) < 2 or self.failures:
            return 0.0
        steps = [one.steps for one in self.fresh]
        return stdev(steps) / fmean(steps) / math.sqrt(len(steps))

    @property
    def failures(self) -> int:
        """Number of fresh seeds that did not reach the target."""
        return sum(one.end != TARGET for one in self.fresh)


@dataclass(frozen=True)
class Advised:
    """The advice of one training at the present batch size.

    Args:
        seed: of the training.
        batch_size: advised for this machine; None where there was no advice.
        noise_scale: that the advice rests on.
    """

    seed: int
    batch_size: int | None
    noise_scale: float | None


@dataclass
class WorkloadResult:
    """Everything that was measured of one workload.

    Args:
        name: the workload.
        present: its present batch size.
        sweep: batch sizes among which the best one is sought.
        sizes: trainings by batch size, also of an advised one that is not in the sweep.
        advice: one per seed.
        seconds: of a step, by batch size.
    """

    name: str
    present: int
    sweep: list[int]
    sizes: dict[int, SizeResult] = field(default_factory=dict)
    advice: list[Advised] = field(default_factory=list)
    seconds: dict[int, Times] = field(default_factory=dict)

    @property
    def advised(self) -> int | None:
        """Median of the advised sizes; None where not most of the trainings have advice."""
        sizes = [one.batch_size for one in self.advice if one.batch_size is not None]
        return median_low(sizes) if 2 * len(sizes) > len(self.advice) else None


Results = dict[str, WorkloadResult]
"""Results by workload."""


def about(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a sweep, and the machine and the versions that it was run with."""
    return {
        "plan": json.loads(json.dumps(plan)),  # tuples are lists, as in the file
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def write_results(path: Path, about: Mapping[str, Any], results: Results) -> None:
    """Replaces the file at `path`."""
    workloads = {name: asdict(result) for name, result in results.items()}
    content = {"format": FORMAT, "about": about, "workloads": workloads}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    write_atomically(path, f"{text}\n".encode())


def read_results(path: Path) -> tuple[dict[str, Any], Results]:
    """What `write_results` wrote.

    Raises:
        RunError: the file is not one of this command.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(content["format"])
        return content["about"], {
            name: _workload_result(one) for name, one in content["workloads"].items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} was not written by {FORMAT} and is left as it is ({error!r}); give another "
            "name"
        ) from None


def _workload_result(one: dict[str, Any]) -> WorkloadResult:
    return WorkloadResult(
        one["name"],
        one["present"],
        one["sweep"],
        {int(size): _size_result(result) for size, result in one["sizes"].items()},
        [Advised(**advised) for advised in one["advice"]],
        {int(size): Times(**seconds) for size, seconds in one["seconds"].items()},
    )


def _size_result(one: dict[str, Any]) -> SizeResult:
    tuning, fresh = ([Result(**each) for each in one[part]] for part in ("tuning", "fresh"))
    return SizeResult(one["batch_size"], one["rate"], tuning, fresh)
