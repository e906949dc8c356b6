"""Amounts of training in words, "16 steps", "4K samples" or "2 epochs": one grammar for all."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from bigbatch.errors import SettingError

NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_EXAMPLES = {"step": '"16 steps"', "sample": '"4K samples"', "epoch": '"2 epochs"'}


def amount_pattern(*units: str) -> str:
    """A regular expression for an amount in one of these units, whose groups `Amount` reads."""
    return rf"(?P<number>{NUMBER})(?P<suffix>[KMBTkmbt]?) ?(?P<unit>{'|'.join(units)})s?"


_ANY = re.compile(amount_pattern("step", "sample", "epoch", "token"))


@dataclass(frozen=True)
class Amount:
    """So much training.

    Args:
        count: how much, exact; a whole number of all but epochs.
        unit: "sample", "token", "epoch" or "step".
    Example:
        >>> print(Amount.parse("4.5K samples"), Amount.parse("1 epoch"))
        4500 samples 1 epoch
    """

    count: Fraction
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """The amount that a text names; K, M, B and T are thousands, millions and so on.

        Raises:
            SettingError: it names none.
        """
        found = _ANY.fullmatch(" ".join(text.split()))
        if found is None:
            raise SettingError(f"{text!r} is no amount such as 500 steps, 2M samples or 20 epochs")
        return cls.from_match(found.groupdict())

    @classmethod
    def from_match(cls, found: dict[str, str]) -> "Amount":
        """The amount from the groups that a match of `amount_pattern` has.

        Raises:
            SettingError: a part of a sample, token or step, or nothing at all.
        """
        unit = found["unit"].lower()
        count = Fraction(found["number"]) * _SUFFIXES[found["suffix"].lower()]
        if count <= 0 or (unit != "epoch" and count.denominator > 1):
            raise SettingError(f"{float(count):g} {unit}s must be a whole number of at least 1")
        return cls(count, unit)

    def __str__(self) -> str:
        count = self.count.numerator if self.count.denominator == 1 else float(self.count)
        return f"{count} {self.unit}{'s' * (count != 1)}"

    def times(self, samples: int, steps: int, epochs: int | Fraction) -> Fraction:
        """How many times this amount fits into a training that has done so much; exact."""
        done = {"sample": samples, "token": samples, "step": steps, "epoch": epochs}[self.unit]
        return Fraction(done) / self.count

    def ends_in_step(self, steps: int, samples: int, batch_size: int, epoch: int) -> bool:
        """Whether a multiple of this amount is reached in the last step.

        Args:
            steps: steps done, the last one included.
            samples: samples seen, those of the last step included.
            batch_size: samples of the last step.
            epoch: samples of an epoch.
        """
        before, now = (
            math.floor(self.times(seen, done, Fraction(seen, epoch)))
            for seen, done in ((samples - batch_size, steps - 1), (samples, steps))
        )
        return now > before

    def in_samples(self, epoch: int) -> float:
        """The same in samples, for an amount of samples or epochs; an epoch has so many."""
        return float(self.count * {"sample": 1, "epoch": epoch}[self.unit])


class AmountIn:
    """Texts that name an amount in one of some units, for an annotation: `Annotated[str, ...]`.

    Args:
        units: those allowed.
        whole_epochs: whether a part of an epoch cannot be counted.
    Example:
        >>> "4K samples" in AmountIn("step", "sample"), "1 epoch" in AmountIn("step", "sample")
        (True, False)
    """

    def __init__(self, *units: str, whole_epochs: bool = True) -> None:
        self._units, self._whole_epochs = units, whole_epochs

    def __contains__(self, text: str) -> bool:
        try:
            amount = Amount.parse(text)
        except SettingError:
            return False
        return amount.unit in self._units and (
            amount.count.denominator == 1 or not self._whole_epochs
        )

    def __str__(self) -> str:
        return "such as " + " or ".join(_EXAMPLES[unit] for unit in self._units)


SmoothingWindow = Annotated[str, AmountIn("step", "sample")]
WarmupLength = Annotated[str, AmountIn("step", "sample", "epoch")]
Period = Annotated[str, AmountIn("step", "sample", "epoch", whole_epochs=False)]
