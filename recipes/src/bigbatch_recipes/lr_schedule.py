"""Learning-rate schedules over the samples of a training, described by a text."""

import math
import re
from collections.abc import Callable

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import NUMBER, Amount, amount_pattern

_NUMBER = rf"{NUMBER}(?:e-?\d+)?"
_AMOUNT = amount_pattern("sample", "epoch")  # not steps, since the batch size changes

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
    """The factor of the learning rate after each number of samples.

    A text names one shape, and before it, with a semicolon, a warm-up from 0:

        warm-up 8 epochs; cosine
        x0.1 at 91 and 136 epochs
        polynomial 1 over 400M samples
        warm-up 4.9M samples power 2; x0.9 every 16M samples

    Cosine and polynomial reach 0 at the training's end, or after an amount; they begin at the end
    of the warm-up. Epochs of "at" count from the training's start, all others from the warm-up's
    end.

        cosine      (1 + cos(pi t)) / 2         t = share of the samples after the warm-up
        polynomial  (1 - t)^power
        every       factor^(samples / amount)
        warm-up     (samples / amount)^power    power 1 by default

    Raises:
        SettingError: the text is invalid.
    Example:
        >>> factor = LRSchedule("warm-up 1 epoch; cosine").lr_lambda(epochs=3, samples=100)
        >>> [round(factor(n), 3) for n in (0, 50, 100, 200, 300)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def __init__(self, text: str) -> None:
        *prefixes, shape = (part.strip() for part in text.split(";"))
        warmup = _WARM_UP.fullmatch(prefixes[0]) if prefixes else None
        matches = {form: match for form in _FORMS if (match := _FORMS[form].fullmatch(shape))}
        if not matches or len(prefixes) > 1 or (prefixes and warmup is None):
            raise SettingError(
                f"lr_schedule {text!r} is not understood; write one of: {', '.join(_FORMS)}; or "
                "'warm-up AMOUNT [power POWER]' and a semicolon before it; an AMOUNT is 5 epochs "
                "or 2M samples"
            )
        ((form, match),) = matches.items()
        self.text = text
        self._shape, self._form, self._amount = match, form, _amount(match)
        self._warmup = _amount(warmup) if warmup else None
        self._warmup_power = float((warmup and warmup["power"]) or 1)

    def warmup(self, samples: int) -> float:
        """Samples of the warm-up; an epoch has `samples`. 0 without a warm-up."""
        return _in_samples(self._warmup, samples) or 0.0

    def required_samples(self, samples: int) -> float:
        """Samples that a training needs to reach the end of the schedule.

        0 if the schedule is as long as the training; an epoch has `samples`.
        """
        if self._form.startswith("polynomial"):
            return self.warmup(samples) + (_in_samples(self._amount, samples) or 0.0)
        if self._form.startswith("xFACTOR at"):
            return max(float(epoch) for epoch in self._shape["epochs"].split(" and ")) * samples
        return self.warmup(samples)

    def truncation_warning(self, epochs: int, samples: int) -> str:
        """A warning if the training ends before the schedule does; "" otherwise."""
        required, total = self.required_samples(samples), epochs * samples
        if required <= total:
            return ""
        return (
            f"lr_schedule {self.text!r} continues for {required:,.0f} samples, and the training "
            f"ends after {total:,}; raise epochs (or samples, draws), or shorten the schedule"
        )

    def lr_lambda(self, epochs: int, samples: int) -> Callable[[float], float]:
        """The function from samples to the factor, for `epochs` with `samples` each."""
        warmup = self.warmup(samples)
        shape = self._shape_function(warmup, max(epochs * samples - warmup, 1.0), samples)

        def factor(seen: float) -> float:
            scale = min(1.0, seen / warmup) ** self._warmup_power if warmup else 1.0
            return scale * shape(max(0.0, seen - warmup))

        return factor

    def _shape_function(self, warmup: float, rest: float, samples: int) -> Callable[[float], float]:
        values = self._shape.groupdict()
        amount = _in_samples(self._amount, samples)
        if self._form == "cosine":
            return lambda seen: (1 + math.cos(math.pi * min(1.0, seen / rest))) / 2
        if self._form.startswith("polynomial"):
            total, power = amount or rest, float(values["power"])
            return lambda seen: float(max(0.0, 1 - seen / total) ** power)
        if self._form.startswith("xFACTOR at"):
            drops = [float(epoch) * samples - warmup for epoch in values["epochs"].split(" and ")]
            factor = float(values["factor"])
            return lambda seen: float(factor ** sum(seen >= drop for drop in drops))
        if amount is not None:  # xFACTOR every AMOUNT
            decay = float(values["factor"])
            return lambda seen: float(decay ** (seen / amount))
        return lambda seen: 1.0


def _amount(match: re.Match[str]) -> Amount | None:
    groups = match.groupdict()
    return Amount.from_match(groups) if groups.get("unit") else None


def _in_samples(amount: Amount | None, epoch: int) -> float | None:
    """An amount in samples; an epoch has `epoch` of them."""
    if amount is None:
        return None
    return float(amount.count * {"sample": 1, "epoch": epoch}[amount.unit])
