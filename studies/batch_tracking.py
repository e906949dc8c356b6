"""How closely the controller's batch follows that of the true noise scale, and how late.

python -m studies.batch_tracking --seed 0
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import NoiseScale, Policy, SimiGrad, TrainingState
from studies.markdown_tables import Row, show
from studies.noisy_quadratic import Bed

_TRIALS = 6

_TARGETS = (0.1, 0.2, 0.4)  # similarities
_MICRO_BATCHES = (4, 8)
_SMOOTHINGS = (None, "16 steps", "auto")
_SCALE, _RISE = 1000.0, 8.0  # B_simple, and the factor by which it rises at once
_STEPS, _SKIPPED, _RISEN = 240, 40, 0.8  # before and after the rise; of them not counted; followed
_BED = Bed("1/i", "sgd", "constant", 1.0, 0.1, 1.0)  # its gradients' noise has dimension 34


@dataclass(frozen=True)
class Tracking:
    """The batch of one controller over many trials.

    Args:
        policy, smoothing: of the controller.
        micro_batches: k.
        rms: root mean square of ln(B / B*), with B* the policy's batch at the true noise scale.
        bias: mean of it.
        lag: median number of steps until B is at 80 % of an 8 times larger B*.
    """

    policy: Policy
    smoothing: str | None
    micro_batches: int
    rms: float
    bias: float
    lag: float

    def row(self) -> Row:
        """The row of the table."""
        first = next(iter(vars(self.policy).values()))
        return {
            "policy": f"{type(self.policy).__name__}({first:.3g})",
            "k": str(self.micro_batches),
            "smoothing": str(self.smoothing),
            "rms of ln B": f"{self.rms:.2f}",
            "bias": f"{self.bias:+.2f}",
            "lag, steps": f"{self.lag:.0f}",
        }


def run(seed: int = 0, trials: int = _TRIALS) -> Iterator[Tracking]:
    """Every policy, number of micro-batches and smoothing."""
    for target in _TARGETS:
        multiple = 2 * target / (1 - target)
        for micro_batches in _MICRO_BATCHES:
            for smoothing in _SMOOTHINGS:
                yield track(SimiGrad(target), multiple, micro_batches, smoothing, seed, trials)
            yield track(NoiseScale(multiple), multiple, micro_batches, "auto", seed, trials)


def track(
    policy: Policy,
    multiple: float,
    micro_batches: int,
    smoothing: str | None,
    seed: int,
    trials: int,
) -> Tracking:
    """Runs a controller on a noise scale of 1,000 samples that rises to 8,000.

    Args:
        policy: the policy.
        multiple: its batch over the noise scale.
        micro_batches: k.
        smoothing: of the controller.
        seed: of the first trial.
        trials: measured trainings.
    """
    runs = [_trial(policy, multiple, micro_batches, smoothing, seed + n) for n in range(trials)]
    errors = [error for trial, _ in runs for error in trial]
    return Tracking(
        policy,
        smoothing,
        micro_batches,
        rms=math.sqrt(fmean(error**2 for error in errors)),
        bias=fmean(errors),
        lag=median(lag for _, lag in runs),
    )


def _trial(
    policy: Policy, multiple: float, micro_batches: int, smoothing: str | None, seed: int
) -> tuple[list[float], int]:
    """Errors of ln B before the rise, and steps until B has followed it."""
    generator = np.random.default_rng(seed)
    controller = Controller(
        policy, round(multiple * _SCALE), min_batch=micro_batches, smoothing=smoothing
    )
    errors = []
    for step in range(2 * _STEPS):
        scale = _SCALE if step < _STEPS else _RISE * _SCALE
        batch_size = controller.decision.batch_size
        if _SKIPPED <= step < _STEPS:
            errors.append(math.log(batch_size / (multiple * scale)))
        if step >= _STEPS and batch_size >= _RISEN * multiple * scale:
            return errors, step - _STEPS
        moments = _BED.start(1)
        moments *= _BED.grad_variance / (scale * _BED.grad_sqnorm(moments))
        statistics = _BED.measure(moments, batch_size, micro_batches, generator)
        controller.next(statistics, TrainingState(0, batch_size, steps=step + 1))
    return errors, _STEPS


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=_TRIALS, help="trainings of each row")
    parser.add_argument("--tiny", action="store_true", help="one trial")
    given = parser.parse_args(arguments)
    tracked = run(given.seed, 1 if given.tiny else given.trials)
    show("the controller's batch against that of the true noise scale", (t.row() for t in tracked))


if __name__ == "__main__":
    main()
