"""How the learning rate goes over the samples of a training, written down in words."""

import math
import re
from collections.abc import Callable

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import NUMBER, Amount, amount_pattern

_NUMBER = rf"{NUMBER}(?:e-?\d+)?"
_AMOUNT = amount_pattern("sample", "epoch")  # whose rate counts base batches, not steps

_FORMS = {
    "constant": re.compile("constant"),
    "cosine": re.compile("cosine"),
    "polynomial POWER [over AMOUNT]": re.compile(
        rf"polynomial (?P<power>{_NUMBER})(?: over {_AMOUNT})?"
    ),
    "xFACTOR at EPOCH [and EPOCH]... epochs": re.compile(
        rf"x(?P<factor>{_NUMBER}) at (?P<epochs>{_NUMBER}(?: and {_NUMBER})*) epochs?"
    ),
    "xFACTOR every AMOUNT": re.compile(rf"x(?P<factor>{_NUMBER}) every {_AMOUNT}"),
}
_WARM_UP = re.compile(rf"warm-up {_AMOUNT}(?: power (?P<power>{_NUMBER}))?")


class LRSchedule:
    """What the learning rate is multiplied by after each number of samples.

    A text names one shape, and before it, with a semicolon, a warm-up from 0:

        warm-up 8 epochs; cosine
        x0.1 at 91 and 136 epochs
        polynomial 1 over 400M samples
        warm-up 4.9M samples power 2; x0.9 every 16M samples

    Cosine and polynomial go to 0 at the training's end, or over an amount; they begin where the
    warm-up ends. Epochs of "at" are counted from the training's start, all else from there.

        cosine      (1 + cos(pi t)) / 2         t = share of the samples after the warm-up
        polynomial  (1 - t)^power
        every       factor^(samples / amount)
        warm-up     (samples / amount)^power    power 1 unless said

    Args:
        text: as above.
    Raises:
        SettingError: it is none.
    Example:
        >>> factor = LRSchedule("warm-up 1 epoch; cosine").lr_lambda(epochs=3, samples=100)
        >>> [round(factor(n), 3) for n in (0, 50, 100, 200, 300)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def __init__(self, text: str) -> None:
        *before, shape = (part.strip() for part in text.split(";"))
        warmup = _WARM_UP.fullmatch(before[0]) if before else None
        found = {form: match for form in _FORMS if (match := _FORMS[form].fullmatch(shape))}
        if not found or len(before) > 1 or (before and warmup is None):
            raise SettingError(
                f"lr_schedule {text!r} is not understood; write one of: {', '.join(_FORMS)}; or "
                "'warm-up AMOUNT [power POWER]' and a semicolon before it; an AMOUNT is 5 epochs "
                "or 2M samples"
            )
        ((form, match),) = found.items()
        self.text = text
        self._shape, self._form, self._amount = match, form, _amount(match)
        self._warmup = _amount(warmup) if warmup else None
        self._warmup_power = float((warmup and warmup["power"]) or 1)

    def warmup(self, samples: int) -> float:
        """Samples of the warm-up, in epochs of so many; 0 for none."""
        return self._warmup.in_samples(samples) if self._warmup else 0.0

    def required_samples(self, samples: int) -> float:
        """Samples that a training must have for all that the text says to happen.

        0 for what is as long as the training; epochs are of so many `samples`.
        """
        if self._form.startswith("polynomial") and self._amount:
            return self.warmup(samples) + self._amount.in_samples(samples)
        if self._form.startswith("xFACTOR at"):
            return max(float(epoch) for epoch in self._shape["epochs"].split(" and ")) * samples
        return self.warmup(samples)

    def truncation_warning(self, epochs: int, samples: int) -> str:
        """What to say of a training that ends before the text is at its end; "" for nothing."""
        reach, total = self.required_samples(samples), epochs * samples
        if reach <= total:
            return ""
        return (
            f"lr_schedule {self.text!r} continues for {reach:,.0f} samples, and the training ends "
            f"after {total:,}; raise epochs (or samples, draws), or shorten the schedule"
        )

    def lr_lambda(self, epochs: int, samples: int) -> Callable[[float], float]:
        """The factor after so many samples, in a training of `epochs` with `samples` each."""
        first = self.warmup(samples)
        rule = self._rule(first, max(epochs * samples - first, 1.0), samples)

        def factor(seen: float) -> float:
            warmed = min(1.0, seen / first) ** self._warmup_power if first else 1.0
            return warmed * rule(max(0.0, seen - first))

        return factor

    def _rule(self, first: float, rest: float, samples: int) -> Callable[[float], float]:
        found = self._shape.groupdict()
        amount = self._amount.in_samples(samples) if self._amount else None
        if self._form == "cosine":
            return lambda seen: (1 + math.cos(math.pi * min(1.0, seen / rest))) / 2
        if self._form.startswith("polynomial"):
            total, power = amount or rest, float(found["power"])
            return lambda seen: float(max(0.0, 1 - seen / total) ** power)
        if self._form.startswith("xFACTOR at"):
            at = [float(epoch) * samples - first for epoch in found["epochs"].split(" and ")]
            drop = float(found["factor"])
            return lambda seen: float(drop ** sum(seen >= place for place in at))
        if amount is not None:  # xFACTOR every AMOUNT
            decay = float(found["factor"])
            return lambda seen: float(decay ** (seen / amount))
        return lambda seen: 1.0


def _amount(found: re.Match[str]) -> Amount | None:
    """That of a form, where it names one."""
    groups = found.groupdict()
    return Amount.of_match(groups) if groups.get("unit") else None
