"""What a trial of an advice has shown: numbers, and the sentences for them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bigbatch.advisor.loss_curve import Gain, LossCurve


@dataclass
class TrialResult:
    """What a trial has shown."""

    present: int  # batch size
    tried: int  # likewise
    predicted: Gain
    folder: Path
    curves: list[LossCurve] = field(default_factory=list)  # pairs: present, tried
    gains: list[Gain] = field(default_factory=list)  # of each pair
    failure: str = ""  # why there is no gain
    doubts: list[str] = field(default_factory=list)

    @property
    def measured(self) -> Gain:
        """The geometric mean over the pairs."""
        return Gain(
            geometric_mean(one.time for one in self.gains),
            geometric_mean(one.samples for one in self.gains),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything but the curves, which the logs in the folder have."""
        return {
            "present": self.present,
            "tried": self.tried,
            "predicted": vars(self.predicted),
            "measured": vars(self.measured) if self.gains else None,
            "runs": [*map(vars, self.gains)],
            "folder": str(self.folder),
            "failure": self.failure,
            "doubts": self.doubts,
        }


def sentences(result: TrialResult) -> Iterator[str]:
    """The result, the first sentence with everything that matters."""
    if result.failure:
        yield f"The trial of {result.tried} instead of {result.present} failed: {result.failure}"
        return
    measured, predicted = result.measured, result.predicted
    times = sorted(one.time for one in result.gains)
    samples = sorted(one.samples for one in result.gains)
    runs = len(result.gains)
    band = f" ({_band(times[-1], times[0])} over {runs} seeds)" if runs > 1 else ""
    ends = f" ({samples[0]:.2f} to {samples[-1]:.2f})" if runs > 1 else ""
    yield (
        f"{result.tried} instead of {result.present}: predicted {_less(predicted.time)}, measured "
        f"{_less(measured.time)}{band}."
    )
    yield (
        f"Samples to the same loss: predicted {predicted.samples:.2f} times, measured "
        f"{measured.samples:.2f}{ends}."
    )
    yield from result.doubts
    yield f"The runs are in {result.folder}: bigbatch report {result.folder}"


def _less(time: float) -> str:
    return f"{1 - time:.0%} less time" if time <= 1 else f"{time - 1:.0%} more time"


def _band(longest: float, shortest: float) -> str:
    if longest <= 1:
        return f"{1 - longest:.0%} to {1 - shortest:.0%}"
    if shortest > 1:
        return f"{shortest - 1:.0%} to {longest - 1:.0%}"
    return f"{_less(longest)} to {_less(shortest)}"
