"""A schedule of batch sizes, written in words."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import NUMBER, Amount, amount_pattern
from bigbatch.policies.policy import Decision, Needs, TrainingState
from bigbatch.setting_types import Count, Positive, Unit, check_setting, checked
from bigbatch.statistics.noise_scale import GradientStatistics

_MAX_SIZE = 2.0**53  # floats above it are not exact whole numbers; no batch is as large


@checked
@dataclass(frozen=True)
class Schedule:
    """Follows a schedule of batch sizes: doublings, ramps, growth in place of decay.

        64, 128 from 2M samples, 256 from 8M samples
        64 to 512 over 4M samples in steps of 64
        64, x2 every 20 epochs up to 1024
        128, x5 at 60 epochs, x5 at 120 epochs, x5 at 160 epochs up to 3200, then decay

    Each clause changes the batch of the clauses before it. K, M, B, T are thousands, millions and
    so on. "then decay" turns growth beyond the cap into an `lr_factor`, the capped batch over the
    uncapped one. That replaces a decay if the learning rate does not follow the batch by itself, so
    it needs `lr_scaling=None`. The batch is a pure function of `now`: a resumed run needs no state.
    A change comes with the first decision after its moment.

    Args:
        text: the schedule; docs/policies.md has the grammar.
        tokens_per_sample: mean length of a sample, if the schedule counts tokens and the training
            samples; left out where both count tokens, `Batches(unit="tokens")`.
    Raises:
        SettingError: the text is not a schedule; the message has the clause and what is allowed.
    Source:
        Doublings: AdaBatch (Devarakonda et al. 2017, arXiv 1712.02029). Growth in place of decay:
        Smith et al. 2018 (arXiv 1711.00489).
    Example:
        >>> schedule = Schedule("64, x2 every 20 epochs up to 1024")
        >>> step = GradientStatistics(1.0, 576.0, samples=64, micro_batches=4)
        >>> schedule.decide(step, TrainingState(64, 64, epoch=45))
        Decision(batch_size=256, reason='schedule: x2 every 20 epochs up to 1024', lr_factor=1.0)
    """

    text: str
    tokens_per_sample: Positive | None = None

    def __post_init__(self) -> None:
        tokens, clauses = self.tokens_per_sample, self._parsed.clauses
        if tokens is not None and not any("token" in clause.text.lower() for clause in clauses):
            raise SettingError(
                f"tokens_per_sample={tokens:g} has no use: {self.text!r} counts no tokens"
            )

    @property
    def needs(self) -> Needs:
        """No statistics; no rate that follows the batch if growth lowers the rate instead."""
        scaling: Literal["any"] | None = None if self._parsed.decays else "any"
        return Needs(
            statistics=False, lr_scaling=scaling, batch_size=self.batch_size, unit=self._parsed.unit
        )

    @property
    def batch_size(self) -> int:
        """The first batch size."""
        return self._parsed.start

    def decide(self, statistics: GradientStatistics | None, now: TrainingState) -> Decision:
        """The batch size of the schedule at this moment, whatever the statistics are."""
        parsed = self._parsed
        size, reason = float(parsed.start), f"{parsed.start}"
        for clause in parsed.clauses:
            next_size = clause.next_size(size, now)
            if next_size is not None:
                size, reason = min(next_size, _MAX_SIZE), clause.text
        bound = math.inf if now.max_batch is None else now.max_batch
        capped = min(size, parsed.cap)
        factor = min(capped, bound) / size if parsed.decays else 1.0
        return Decision(round(capped), f"schedule: {reason}", factor)

    @cached_property
    def _parsed(self) -> "_Parsed":
        return _Parsed(self.text, self.tokens_per_sample)


@dataclass(frozen=True)
class _Clause:
    """A change of the batch size at one or several moments."""

    text: str  # the clause as it is written
    amount: Amount  # before the change, or between two changes
    size: int  # the size in the text, 0 without one
    factor: float | None  # multiplies the size before
    repeats: bool  # whether the factor applies after every `amount`
    start: int  # the first size of a ramp from the start of the training; 0 without one
    increment: int  # the samples of one step of the ramp

    def __post_init__(self) -> None:
        if self.factor is not None and self.factor <= 1:
            raise SettingError(f"the factor {self.factor:g} must be above 1")
        difference = abs(self.size - self.start) if self.start else 0
        if difference % self.increment:
            raise SettingError(
                f"{difference} samples are no whole number of steps of {self.increment}"
            )

    def next_size(self, size: float, now: TrainingState) -> float | None:
        """The size after the clause, from the size before it; None before its moment."""
        times = self.amount.times(now.samples, now.steps, now.epoch)
        if self.start:  # 64 to 512 over 4M samples in steps of 64, which take equally long
            difference = self.size - self.start
            steps = math.floor(min(times, Fraction(1)) * (abs(difference) // self.increment))
            return self.start + math.copysign(steps * self.increment, difference)
        if times < 1:
            return None
        if self.factor is None:  # 256 from 8M samples
            return self.size
        # x2 every 20 epochs, or x5 at 60 epochs
        power = min(math.floor(times) if self.repeats else 1, math.log(_MAX_SIZE, self.factor))
        return size * float(self.factor**power)


# The grammar, as docs/policies.md has it in words.

_SIZE = r"\d{1,15}"
_AMOUNT = amount_pattern("step", "sample", "epoch", "token")
_FIRST = {
    "SIZE": re.compile(rf"(?P<size>{_SIZE})"),
    "SIZE to SIZE over AMOUNT [in steps of SIZE]": re.compile(
        rf"(?P<start>{_SIZE}) to (?P<size>{_SIZE}) over {_AMOUNT}(?: in steps of (?P<by>{_SIZE}))?"
    ),
}
_LATER = {
    "SIZE from AMOUNT": re.compile(rf"(?P<size>{_SIZE}) from {_AMOUNT}"),
    "xFACTOR at|every AMOUNT [up to SIZE]": re.compile(
        rf"x ?(?P<factor>{NUMBER}) (?P<when>at|every) {_AMOUNT}(?: up to (?P<cap>{_SIZE}))?"
    ),
}
_DECAY = "then decay"


class _Parsed:
    """A parsed schedule."""

    def __init__(self, text: str, tokens_per_sample: float | None) -> None:
        self.start = 0
        self.clauses: list[_Clause] = []
        self.cap = math.inf
        self._tokens_per_sample = tokens_per_sample
        self._units: set[Unit] = set()
        clauses = [" ".join(clause.split()) for clause in text.split(",")]
        self.decays = len(clauses) > 1 and clauses[-1].lower() == _DECAY
        for clause in clauses[: len(clauses) - self.decays]:
            try:
                self._add(clause)
            except SettingError as error:
                raise SettingError(f"schedule {text!r}, clause {clause!r}: {error}") from None
        if len(self._units) > 1:
            raise SettingError(
                f"schedule {text!r} counts samples and tokens; pass tokens_per_sample=, the mean "
                "length of a sample, or count one of them"
            )
        if self.decays and self.cap == math.inf:
            raise SettingError(
                f"schedule {text!r}, clause {_DECAY!r}: allowed after 'up to SIZE' only, which "
                "caps the growth"
            )

    @property
    def unit(self) -> Unit | None:
        """What the amounts count; None if they are steps and epochs."""
        return next(iter(self._units), None)

    def _add(self, text: str) -> None:
        """Adds a clause to those before it."""
        if self.cap < math.inf:
            raise SettingError(f"nothing but {_DECAY!r} may follow 'up to SIZE'")
        groups = _match(text, _LATER if self.start else _FIRST)
        size, start = _size(groups, "size"), _size(groups, "start")
        self.start = self.start or start or size
        if "unit" not in groups:
            return
        amount, factor = self._amount(groups), groups.get("factor")
        repeats, increment = groups.get("when") == "every", _size(groups, "by", 1)
        clause = _Clause(text, amount, size, factor and float(factor), repeats, start, increment)
        for earlier in self.clauses:
            same_kind = earlier.amount.unit == clause.amount.unit and not earlier.repeats
            if same_kind and not clause.repeats and earlier.amount.count > clause.amount.count:
                raise SettingError(
                    f"it comes before {earlier.text!r}; write clauses in order of time"
                )
        self.clauses.append(clause)
        self.cap = _size(groups, "cap", math.inf)
        largest = max(self.start, *(each.size for each in self.clauses))
        if self.cap < largest:
            raise SettingError(f"the cap is below the {largest} samples before it; raise it")

    def _amount(self, groups: dict[str, Any]) -> Amount:
        """The amount in a clause; tokens are converted to samples if they can be."""
        amount = Amount.from_match(groups)
        if amount.count.denominator > 1:
            raise SettingError(f"{amount} must be a whole number")
        if amount.unit in ("step", "epoch"):
            return amount
        is_converted = amount.unit == "token" and self._tokens_per_sample is not None
        self._units.add("samples" if is_converted or amount.unit == "sample" else "tokens")
        if not is_converted:
            return amount
        return Amount(amount.count / Fraction(self._tokens_per_sample or 1), "sample")


def _match(text: str, forms: dict[str, re.Pattern[str]]) -> dict[str, Any]:
    """The groups of the form that the clause matches."""
    for form in forms.values():
        if match := form.fullmatch(text.lower()):
            return match.groupdict()
    raise SettingError(
        f"allowed here: {', or '.join(forms)}; a SIZE is 256 (samples), a FACTOR 2 or 1.5, an "
        "AMOUNT 20 epochs, 500 steps, 2M samples or 8B tokens"
    )


def _size(groups: dict[str, Any], name: str, default: Any = 0) -> Any:
    """The SIZE in a group of a clause."""
    text = groups.get(name)
    return default if text is None else check_setting("size", int(text), Count)
