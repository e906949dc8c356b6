"""Amounts of training in words, "16 steps", "4K samples" or "2 epochs": one grammar for all."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from bigbatch.errors import SettingError

NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_EXAMPLES = {
    "step": '"16 steps"',
    "sample": '"4K samples"',
    "epoch": '"2 epochs"',
    "token": '"4M tokens"',
}


def amount_pattern(*units: str) -> str:
    """A regular expression for an amount in one of these units; see `Amount.from_match`."""
    return rf"(?P<number>{NUMBER})(?P<suffix>[KMBTkmbt]?) ?(?P<unit>{'|'.join(units)})s?"


_ANY = re.compile(amount_pattern("step", "sample", "epoch", "token"))


@dataclass(frozen=True)
class Amount:
    """An amount of training.

    Example:
        >>> print(Amount.parse("4.5K samples"), Amount.parse("1 epoch"))
        4500 samples 1 epoch
    """

    count: Fraction  # exact number of units; whole, except of epochs
    unit: str  # "sample", "token", "epoch" or "step"

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """Parses a text; K, M, B and T are thousands, millions, billions and trillions."""
        match = _ANY.fullmatch(" ".join(text.split()))
        if match is None:
            raise SettingError(f"{text!r} is no amount such as 500 steps, 2M samples or 20 epochs")
        return cls.from_match(match.groupdict())

    @classmethod
    def from_match(cls, groups: dict[str, str]) -> "Amount":
        """The amount from the named groups of a match of `amount_pattern`.

        Raises:
            SettingError: the number is 0, or a fraction of a sample, token or step.
        """
        unit = groups["unit"].lower()
        count = Fraction(groups["number"]) * _SUFFIXES[groups["suffix"].lower()]
        if count <= 0 or (unit != "epoch" and count.denominator > 1):
            raise SettingError(f"{float(count):g} {unit}s must be a whole number of at least 1")
        return cls(count, unit)

    def __str__(self) -> str:
        count = self.count.numerator if self.count.denominator == 1 else float(self.count)
        return f"{count} {self.unit}{'s' * (count != 1)}"

    def times(self, samples: int, steps: int, epochs: int | Fraction) -> Fraction:
        """How many times the amount fits into a training of this length; exact.

        Tokens are the samples of a training whose unit they are.
        """
        done = {"sample": samples, "token": samples, "step": steps, "epoch": epochs}
        return Fraction(done[self.unit]) / self.count


class AmountIn:
    """The texts that are an amount in one of these units, for `Annotated[str, AmountIn(...)]`.

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

    __repr__ = __str__  # in `help()`


SmoothingWindow = Annotated[str, AmountIn("step", "sample", "token")]
Smoothing = Literal["auto"] | SmoothingWindow | None
WarmupLength = Annotated[str, AmountIn("step", "sample", "token", "epoch")]
